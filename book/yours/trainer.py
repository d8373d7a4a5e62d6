"""Your trainer: the pieces that the chapters ask for, and at the end the update and the loop that use them."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

# ---- chapter 2


def largest(peak, room):
    raise NotImplementedError


# ---- chapter 4


def amp_update(loss, optimizer, scaler, max_norm):
    raise NotImplementedError


# ---- chapter 5


def step_flop(config, B, S):
    """Return the FLOP of a forward and backward pass, with weights and in attention."""
    h, f = config["hidden_size"], config["intermediate_size"]
    a, k = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or h // a
    block = 2 * h * a * d + 2 * h * k * d + 3 * h * f  # q and output; k and v; gate, up and down
    weights = config["num_hidden_layers"] * block + h * config["vocab_size"]
    return 6 * weights * B * S, 12 * config["num_hidden_layers"] * a * d * S * B * S


# ---- chapter 6


def accumulate(model, micro_batches, optimizer):
    raise NotImplementedError


def split(lengths, room):
    raise NotImplementedError


# ---- chapter 6, "Batches of texts"


def collate(texts, pad):
    raise NotImplementedError


def pack(lengths, S):
    raise NotImplementedError


# ---- chapter 7


def parameter_groups(model, decay):
    raise NotImplementedError


# ---- chapter 7, "Learning rates"


def factor(step, warmup, decay, total):
    raise NotImplementedError


def scaled_update(loss, weights, optimizer, scaler, limit):
    raise NotImplementedError


# ---- chapter 7, "Learning rates that carry over"


def scaled_groups(model, rate, decay, ratio):
    raise NotImplementedError


def noise_scale_of(gradients, tokens):
    raise NotImplementedError


def take_step(norm, before, times=5.0, window=4):
    raise NotImplementedError


# ---- chapter 8


def first_blocks(blocks, x, n):
    raise NotImplementedError


class Enough(Exception):
    """All tensors that the backward pass needs have been recomputed."""


def by_hooks_early(block, x):
    raise NotImplementedError


# ---- chapter 9


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, count, chunk):
        raise NotImplementedError

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def fused_loss(hidden, weight, targets, count, chunk):
    return FusedLoss.apply(hidden, weight, targets, count, chunk)


def largest_chunk(T, V, room):
    raise NotImplementedError


# ---- the trainer: it works from chapter 1 on, and each stage of README.md removes a NotImplementedError


def micro_batches(sequences, room):
    """Pad `sequences` of token ids into (ids, labels) of at most `room` tokens each; labels of padding are -100."""
    raise NotImplementedError  # chapter 6


def mean_loss(model, ids, labels, count, checkpointed=0, chunk=0):
    """Return the sum of the losses of all labels except -100, divided by `count`."""
    if checkpointed:
        raise NotImplementedError  # chapter 8: checkpoint that many blocks
    if chunk:
        raise NotImplementedError  # chapter 9: never more than `chunk` rows of logits
    predicted, answers = model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(predicted, answers, reduction="sum") / count


def update(model, batches, optimizer, *, limit=math.inf, dtype=None, scaler=None, checkpointed=0, chunk=0):
    """Update the weights once, from all micro-batches (ids, labels) in `batches`; return the mean loss per token."""
    if dtype is not None or scaler is not None:
        raise NotImplementedError  # chapter 4: autocast to `dtype`, and scale the loss if there is a scaler
    if len(batches) > 1:
        raise NotImplementedError  # chapter 6: accumulate
    ((ids, labels),) = batches
    count = int((labels[:, 1:] != -100).sum())
    optimizer.zero_grad()
    loss = mean_loss(model, ids, labels, count, checkpointed, chunk)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
    return loss.item()


def train(model, optimizer, updates, schedule=lambda step: 1.0, **options):
    """Update once for each list of micro-batches in `updates`, at `schedule(step)` times the learning rate.

    Return the losses. `options` are those of `update`.
    """
    rates, losses = [group["lr"] for group in optimizer.param_groups], []
    for step, batches in enumerate(updates):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * schedule(step)
        losses.append(update(model, batches, optimizer, **options))
    return losses
