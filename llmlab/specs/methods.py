"""What each training method adds to a step: sequences, other models, passes without gradients, and the loss's head.

The trainers are those of TRL 1.16 (trl/trainer and trl/experimental), but the loss of SFT is that of transformers. PPO,
which TRL has removed, is described as GRPO with a value and a reward model (Schulman et al., arXiv 1707.06347; Ouyang
et al., arXiv 2203.02155).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

MethodName = Literal["sft", "dpo", "orpo", "kto", "reward", "distill", "ppo", "grpo"]
# kept: a second copy of the weights. offloaded: that copy is in host memory, and on the GPU only during its pass.
# adapter: the model itself without its adapters. precomputed: log-probabilities that were computed before training.
Reference = Literal["kept", "offloaded", "adapter", "precomputed"]
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)
REFERENCES: tuple[Reference | None, ...] = (None, *get_args(Reference))


class Method(NamedTuple):
    """The cost of a method, per micro-batch.

    `sequences` is the number of sequences per sample: 2 for a chosen and a rejected answer. `loss` is the input of the
    loss: "logits" (transformers' own loss), "whole" logits of both answers, "chunked" log-probabilities, for which the
    whole logits never exist, one "score" per sequence, or also a "teacher"'s logits. `reference` and `own` are the
    numbers of passes without gradients of the reference model and of the trained model; an `optional` reference model
    runs only if the run has one. `critic`: a value model is trained, and a reward model is in memory. `generates`: an
    engine generates the sequences before each update.
    """

    sequences: int = 1
    loss: Literal["logits", "whole", "chunked", "score", "teacher"] = "logits"
    reference: int = 0
    optional: bool = False
    own: int = 0
    critic: bool = False
    generates: bool = False


METHODS: dict[str, Method] = {
    "sft": Method(),
    "dpo": Method(sequences=2, loss="chunked", reference=1),
    "orpo": Method(sequences=2, loss="whole"),
    # One pass of each is on mismatched answers, which estimate the KL.
    "kto": Method(loss="chunked", reference=2, own=1),
    "reward": Method(sequences=2, loss="score"),
    "distill": Method(loss="teacher"),
    # An engine's log-probabilities differ from those of the trained model, which therefore computes them again.
    "ppo": Method(loss="chunked", reference=1, own=1, critic=True, generates=True),
    "grpo": Method(loss="chunked", reference=1, optional=True, own=1, generates=True),
}
