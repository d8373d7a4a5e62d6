"""What a training method adds to a step: models beside the trained one, their passes, and logits or tiles of them.

    N  tokens that the loss scores     h  hidden     V  vocabulary
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ...specs.model import ModelSpec
from ...specs.model import model as find_model
from ...specs.run import Training
from .precision import PRECISION
from .share import Share

TOKENS, WORDS = 4096, 32768  # of a tile of logits (course/techniques/chunked_logprobs.py)


class Other(NamedTuple):
    """A model that reads the step's sequences without gradients: its sizes, its passes per micro-batch, whether its
    head does too, and whether a copy of it stays on the GPU."""

    spec: ModelSpec
    passes: int
    scores: bool = True
    resides: bool = False


def other_models(spec: ModelSpec, run: Training) -> list[Other]:
    """Return the passes without gradients of a step of `run`."""
    own, models = run.objective, []
    if own.own:
        models.append(Other(spec, own.own))
    if run.reference_model not in (None, "precomputed"):
        models.append(Other(spec, own.reference, resides=run.reference_model == "kept"))
    if own.loss == "teacher":
        models.append(Other(find_model(run.teacher) if run.teacher else spec, 1, resides=True))
    if own.critic:
        models.append(Other(spec, 1, scores=False, resides=True))  # the reward model
    return models


def copies(spec: ModelSpec, run: Training) -> int:
    """Return the bytes of the frozen models that stay on one GPU."""
    return sum(
        _bytes(run, other.spec.parameters - (0 if other.scores else other.spec.parameters_by_component["head"]))
        for other in other_models(spec, run) if other.resides
    )  # fmt: skip


def offloaded(spec: ModelSpec, run: Training) -> int:
    """Return the bytes of a reference model that comes from the host for its pass alone."""
    return _bytes(run, spec.parameters) if run.reference_model == "offloaded" else 0


def _bytes(run: Training, parameters: int) -> int:
    """Return the bytes of frozen weights on one GPU. FSDP2's policy shards fp32 weights, with zero=2 too."""
    b = PRECISION[run.precision]
    width = b.master or b.weights if run.zero >= 2 else b.weights
    return width * parameters // (run.dp_shard if run.zero == 3 else 1)


def loss_bytes(share: Share) -> tuple[int, int, int] | None:
    """Return the bytes of logits, or of what stands for them, in the loss, as their gradient is made, and as the head's
    is; None for a loss that `temporaries.loss_bytes` knows.

    Chunked: a tile; in backward also fp32 sums of the hidden states' gradient and of the head's, and these in the
    weights' dtype. Whole: logits, a copy of the chosen half and its log_softmax; then the gradients of all and of half,
    padded to whole sequences. Teacher: logits of both models, copies by temperature, log_softmax of both and three
    temporaries of the divergence; then four gradients.
    """
    spec, run, b = share.spec, share.run, share.bytes
    kind, wide = run.objective.loss, 4 if share.autocast else b.compute
    logits = share.tokens * spec.vocab
    if kind == "whole":
        return int(logits * (1.5 * b.compute + 0.5 * wide)), int(2.5 * logits * b.compute), logits * b.compute
    if kind == "teacher":
        return logits * (4 * b.compute + 5 * wide), 4 * logits * wide, logits * b.compute
    if kind != "chunked":
        return None
    scored, trained = run.scored, 0 if run.lora else spec.vocab * spec.hidden
    tile = b.compute * min(scored, TOKENS) * (WORDS + (spec.hidden if share.autocast else 0))
    narrow = b.residual if b.residual < 4 else 0
    sums = scored * spec.hidden * (4 + narrow) + trained * (4 + (b.gradients if b.gradients < 4 else 0))
    return tile, tile + sums, 0


def value_run(run: Training) -> Training:
    """Return the training step of PPO's value model: all its weights, a score for each token instead of logits."""
    return replace(run.update, lora=None, num_labels=1)
