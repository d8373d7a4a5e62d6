"""Megatron-LM's options that change what a training step takes, under Megatron's own names.

>>> Megatron(recompute="full", recompute_num_layers=2)
Megatron(recompute='full', recompute_num_layers=2)
>>> Megatron(recompute="selective", recompute_method="block")  # doctest: +IGNORE_EXCEPTION_DETAIL
Traceback (most recent call last):
llmlab.base.errors.SpecError: recompute_method='block' is for recompute='full'; ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..base.errors import SpecError
from .run import _Spec

Recompute = Literal["selective", "full"]
Method = Literal["uniform", "block"]


@dataclass(frozen=True, repr=False)
class Megatron(_Spec):
    """Megatron-LM with its GPT model: `Training(stack=lab.Megatron(...))`, or "megatron" for the defaults.

    `recompute` is --recompute-granularity: "selective" computes `recompute_modules` again, of "core_attn" and "mlp"; "full"
    keeps the input of every `recompute_num_layers` layers ("uniform"), or of so many layers of
    each virtual stage and the others whole ("block"). None is Training's `checkpointing`.

    `transformer_engine`: layers of Transformer Engine, or Megatron's own with Apex (--transformer-impl local).
    `masked_softmax_fusion`: where attention="eager" (--attention-backend unfused), whether softmax is one kernel in
    half precision; Megatron falls back to PyTorch's in fp32 without Apex. `accumulate_allreduce_grads_in_fp32`: None
    is Megatron's default, True for bf16 and False for fp16. `virtual_pipeline` is the number of model chunks of each
    rank (--num-virtual-stages-per-pipeline-rank), and `make_vocab_size_divisible_by` pads the vocabulary, per
    tensor-parallel rank. The distributed optimizer is Training's zero=1, sequence parallelism its sequence_parallel.
    """

    recompute: Recompute | None = None
    recompute_method: Method | None = None
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    transformer_engine: bool = True
    masked_softmax_fusion: bool = True
    accumulate_allreduce_grads_in_fp32: bool | None = None
    virtual_pipeline: int = 1
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        self._check_counts("recompute_num_layers", "virtual_pipeline", "make_vocab_size_divisible_by")
        self._check_choices(
            recompute=(None, "selective", "full"),
            recompute_method=(None, "uniform", "block"),
            transformer_engine=(True, False),
            masked_softmax_fusion=(True, False),
            accumulate_allreduce_grads_in_fp32=(None, True, False),
        )
        if self.recompute_method and self.recompute == "selective":
            raise SpecError(
                f"recompute_method={self.recompute_method!r} is for recompute='full'; 'selective' recomputes the core "
                "attention of every layer"
            )
