"""What each training method adds to a step: sequences, other models, passes without gradients, and the loss's head.

The trainers are TRL's, version 1.16 (trl/trainer and trl/experimental), and for PPO, which has left TRL, the same parts
as GRPO with a value and a reward model (Schulman et al., arXiv 1707.06347; Ouyang et al., arXiv 2203.02155).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

MethodName = Literal["sft", "dpo", "orpo", "kto", "reward", "distill", "ppo", "grpo"]
# kept: a second copy of the weights. offloaded: that copy in host memory, on the GPU for its pass alone. adapter: the
# model itself with its adapters off. precomputed: log-probabilities that were computed before training.
Reference = Literal["kept", "offloaded", "adapter", "precomputed"]
METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)
REFERENCES: tuple[Reference | None, ...] = (None, *get_args(Reference))


class Method(NamedTuple):
    """The cost of a method, per micro-batch.

    `sequences` go through the model for each sample, 2 for a chosen and a rejected answer. `loss` is what the loss
    reads: "logits" (transformers' own), "whole" logits of both answers, "chunked" log-probabilities, for which the
    logits never exist whole, one "score" per sequence, or a "teacher"'s logits too. `reference` and `own` count the
    passes without gradients of the reference model (only if one is asked for, where it is `optional`) and of the
    trained one. `critic`: a value model is trained and a reward model resides. `generates`: an engine generates the
    sequences before each update.
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
    "kto": Method(loss="chunked", reference=2, own=1),  # a pass of each for mismatched answers, which estimate the KL
    "reward": Method(sequences=2, loss="score"),
    "distill": Method(loss="teacher"),
    # An engine's log-probabilities differ from the trained model's, so that one computes them again.
    "ppo": Method(loss="chunked", reference=1, own=1, critic=True, generates=True),
    "grpo": Method(loss="chunked", reference=1, optional=True, own=1, generates=True),
}
