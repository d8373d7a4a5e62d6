"""The losses of the training methods, and the frozen or second models that they read, as TRL's trainers compute them.

    B  sequences     T  tokens of one     h  hidden     V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..course.techniques.chunked_logprobs import chunked_log_probs, log_probs
from ..specs.model import ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Training

BETA, CLIP, VALUE_WEIGHT = 0.1, 0.2, 0.1  # TRL's defaults, of which no cost depends
Built = Callable[[ModelSpec, Training], Any]
Models = dict[str, Any]  # by what they are for; the trained one is "trained"


def other_models(spec: ModelSpec, run: Training, build: Built) -> dict[str, nn.Module]:
    """Return the models that reside beside the trained one, made by `build`; all but the value model are frozen."""
    own = run.objective
    models: dict[str, nn.Module] = {}
    whole = partial(replace, lora=None, quantization=None, reference=None)
    if run.reference_model in ("kept", "offloaded"):
        models["reference"] = build(spec, whole(run, checkpointing=None))
    if own.loss == "teacher":
        models["teacher"] = build(find_model(run.teacher) if run.teacher else spec, whole(run, checkpointing=None))
    if own.critic:
        models["reward"] = build(spec, whole(run.update, checkpointing=None, num_labels=1))
    for model in models.values():
        model.eval().requires_grad_(False)
    if run.reference_model == "offloaded":
        models["reference"].to("cpu")
    if own.critic:
        models["value"] = build(spec, whole(run.update, num_labels=1))
    return models


def score_tokens(model: Any, run: Training) -> None:
    """Let the model's forward pass return log-probabilities (B, T - 1), or those of a completion, without logits.

    It stays a forward pass, so that FSDP gathers the head for it, and DDP watches it.
    """

    def forward(self: Any, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        last = run.completion_len or run.seq_len - 1
        hidden, targets = hidden[:, -1 - last : -1], input_ids[:, -last:]
        log_probs = chunked_log_probs(hidden.reshape(-1, hidden.shape[-1]), head(self).weight, targets.reshape(-1))
        return log_probs.view(targets.shape)

    model.forward = MethodType(forward, model)


def head(model: Any) -> nn.Linear:
    """Return the head of a language model."""
    linear: nn.Linear = model.get_output_embeddings()
    return linear


@contextmanager
def _reference(run: Training, models: Models, device: torch.device) -> Iterator[Any]:
    """Give the reference model: the copy, which is on the GPU for this block alone if it is offloaded, or the model
    without its adapters."""
    if run.reference_model == "adapter":
        with models["trained"].disable_adapter():
            yield models["trained"]
        return
    model = models["reference"]
    if run.reference_model == "offloaded":
        model.to(device)
    yield model
    if run.reference_model == "offloaded":
        model.to("cpu")


def loss_of(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the loss of a micro-batch (B, T), and the logits where they exist whole."""
    return LOSSES[run.method](run, models, ids)


def _preference(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, None]:
    """DPO (arXiv 2305.18290, equation 7)."""
    early = _reference_sums(run, models, ids) if run.reference_model == "offloaded" else None  # while there is room
    trained = models["trained"](input_ids=ids).sum(1)  # (2B,), the chosen first
    chosen, rejected = (trained - (_reference_sums(run, models, ids) if early is None else early)).chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).mean(), None


def _reference_sums(run: Training, models: Models, ids: Tensor) -> Tensor:
    if run.reference_model == "precomputed":
        return torch.zeros(len(ids), device=ids.device)
    with torch.no_grad(), _reference(run, models, ids.device) as model:
        total: Tensor = model(input_ids=ids).sum(1)
        return total


def _odds_ratio(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ORPO (arXiv 2403.07691, equations 6 and 7); TRL computes whole logits, and a copy of the chosen ones."""
    logits = models["trained"](input_ids=ids, use_cache=False).logits  # (2B, T, V)
    half = len(ids) // 2
    likelihood = F.cross_entropy(logits[:half, :-1].contiguous().flatten(0, 1), ids[:half, 1:].flatten())
    chosen, rejected = log_probs(logits[:, :-1], ids[:, 1:]).mean(1).chunk(2)
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return likelihood - BETA * F.logsigmoid(odds).mean(), logits


def _unpaired(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, None]:
    """KTO (arXiv 2402.01306, equation 8), with the KL estimated on mismatched answers."""
    other = ids.roll(1, 0)
    with torch.no_grad():
        drift = models["trained"](input_ids=other).sum(1)
    trained = models["trained"](input_ids=ids).sum(1)
    drift = (drift - _reference_sums(run, models, other)).mean().clamp(min=0)
    ratio = trained - _reference_sums(run, models, ids)
    sign = torch.ones_like(ratio)
    sign[::2] = -1
    return (1 - torch.sigmoid(BETA * sign * (ratio - drift))).mean(), None


def _ranking(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, None]:
    """Bradley-Terry (arXiv 2203.02155, equation 1)."""
    chosen, rejected = models["trained"](input_ids=ids, use_cache=False).logits[:, 0].chunk(2)
    return -F.logsigmoid(chosen - rejected).mean(), None


def _distillation(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The KL divergence to a teacher, on whole logits, as TRL's GKD computes it with beta=0 (arXiv 2306.13649)."""
    logits = models["trained"](input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        teacher = models["teacher"](input_ids=ids, use_cache=False).logits
    temperature, rows = 1.0, torch.arange(ids[:, 1:].numel(), device=ids.device)
    student, target = logits[:, :-1] / temperature, teacher[:, :-1] / temperature
    divergence = F.kl_div(student.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True)
    return divergence.flatten(0, 1).index_select(0, rows).sum() / len(rows), logits  # of the tokens that count


def _policy_gradient(run: Training, models: Models, ids: Tensor) -> tuple[Tensor, None]:
    """PPO's clipped objective on advantages that generation left (arXiv 1707.06347, equation 7); with a critic its
    values are fitted in the same backward pass."""
    with torch.no_grad():
        before = models["trained"](input_ids=ids)  # (B, completion)
        if run.reference_model not in (None, "precomputed"):
            with _reference(run, models, ids.device) as model:
                reference = model(input_ids=ids)
        if "reward" in models:
            models["reward"](input_ids=ids, use_cache=False)
    trained = models["trained"](input_ids=ids)
    advantages = torch.ones(len(ids), 1, device=ids.device)
    ratio = (trained - before).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    if run.reference_model:
        log_ratio = (reference if run.reference_model != "precomputed" else before) - trained
        loss = loss + BETA * (log_ratio.exp() - log_ratio - 1).mean()
    if "value" in models:
        values = models["value"]
        hidden = values.base_model(input_ids=ids, use_cache=False).last_hidden_state
        loss = loss + VALUE_WEIGHT * values.score(hidden).square().mean()
    return loss, None


LOSSES: dict[str, Callable[[Training, Models, Tensor], tuple[Tensor, Tensor | None]]] = {
    "dpo": _preference, "orpo": _odds_ratio, "kto": _unpaired, "reward": _ranking, "distill": _distillation,
    "ppo": _policy_gradient, "grpo": _policy_gradient,
}  # fmt: skip
