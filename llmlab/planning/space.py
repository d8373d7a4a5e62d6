"""The fields of a Training that a plan varies, and their possible combinations, without any costs.

A *shape* sets the computation: precision, micro-batch, checkpointing, kernels, compile, tp, pp, cp, the pipeline's
schedule. A *share* sets which rank stores what: optimizer, ZeRO stage, HSDP's replicas, offload, ep. A candidate
combines one of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import isqrt
from typing import Any

from ..specs.generic import attentions
from ..specs.model import ModelSpec
from ..specs.run import LoRA, Training
from ..specs.stacks import StackOptions, Transformers
from .machines import Machines

# Whether a program of files/ can run a candidate depends on these fields, and on which of the degrees exceed 1.
OF_PROGRAM = ("precision", "checkpointing", "attention", "lora", "quantization", "compile", "kernels", "fp8", "stack",
              "sequence_parallel")  # fmt: skip
DEGREES = ("dp", "tp", "pp", "cp")
# The fields of shares, and two that depend on the ZeRO stage.
SHARED = ("optimizer", "ep", "offload", "zero", "dp_replicate", "sync_each_batch", "reduce_dtype")
METHODS = ("full", "lora", "qlora")
GOALS = ("fastest", "cheapest", "smallest")
# These fields are varied only if `allow` lists them, because they change the trained model or need a package.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "optimizer": ("adamw", "adamw-8bit", "adafactor", "lion", "muon"), "precision": ("bf16",),
    "kernels": ("liger", None), "fp8": ("tensorwise", "rowwise", None), "lora": ("lora", "qlora"), "seq_len": (512,),
}  # fmt: skip
LEAST_TOKENS = 1024  # of a sequence per context-parallel rank: with fewer, a ring sends more than it computes


@dataclass(frozen=True)
class Question:
    """The arguments of `lab.plan`: `global_batch` sequences of `seq_len` tokens per update, and the others."""

    spec: ModelSpec
    global_batch: int
    method: str = "full"
    allow: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stack: StackOptions = field(default_factory=Transformers)
    goal: str = "fastest"
    tokens: int | None = None
    within: float | None = None  # days

    @property
    def seq_len(self) -> int:
        return int(self.fixed.get("seq_len", Training.seq_len))

    def options(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values that `name` may have: the fixed one, else those of `values` that the stack supports. If it
        supports none, all are returned, and creating the run raises the error."""
        if name in self.fixed:
            return (self.fixed[name],)
        if name in self.stack.allowed:
            return [value for value in values if value in self.stack.allowed[name]] or values
        return values

    def late(self, seconds: float, run: Training) -> bool:
        """Return whether training with steps of `seconds` misses the deadline."""
        if self.within is None or not self.tokens:
            return False
        return seconds * self.tokens / (run.global_batch * run.seq_len) > self.within * 86_400


@lru_cache(1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return (*small, *(number // divisor for divisor in reversed(small) if divisor * divisor < number))


def shapes(q: Question, machines: Machines) -> Iterator[dict[str, Any]]:
    """Yield the fields of each shape. Tensor parallelism comes with sequence parallelism, which saves memory and costs
    no time, unless that field is fixed."""
    methods = (q.method, *ALLOWED["lora"]) if "lora" in q.allow else (q.method,)
    for method, (seq_len, batch) in product(dict.fromkeys(methods), lengths(q)):
        kinds = list(_kinds(q, machines, method))
        for tp, pp, cp in _degrees(q, machines, seq_len):
            dp = machines.total // (tp * pp * cp)
            cut = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "sequence_parallel": tp > 1, "seq_len": seq_len}
            if "sequence_parallel" in q.fixed:
                cut["sequence_parallel"] = q.fixed["sequence_parallel"]
            for micro_batch, accumulation in _micro_batches(q, batch, dp):
                sizes = {**cut, "micro_batch": micro_batch, "accumulation": accumulation}
                for kind, stack in product(kinds, _schedules(q, pp, accumulation)):
                    yield {**q.fixed, **stack, **kind, **sizes}


def lengths(q: Question) -> Iterator[tuple[int, int]]:
    """Yield sequence lengths, each with the global batch that keeps the tokens per update the same."""
    length, batch = q.seq_len, q.global_batch
    yield length, batch
    while "seq_len" in q.allow and (length := length // 2) >= ALLOWED["seq_len"][0]:
        batch *= 2
        yield length, batch


def _kinds(q: Question, machines: Machines, method: str) -> Iterator[dict[str, Any]]:
    half = "bf16" if machines.gpu.supports_bf16 else "fp16"
    precisions: tuple[str, ...] = (f"autocast-{half}", f"mixed-{half}") if method == "full" else (half,)
    if method == "full" and "precision" in q.allow and half == "bf16":
        precisions += ALLOWED["precision"]
    if not set(precisions) & set(q.stack.allowed.get("precision", precisions)):
        precisions = (half,)  # torchtune and LitGPT keep no fp32 copy
    base: dict[str, Any] = {"attention": "eager"} if "sdpa" not in attentions(q.spec.family) else {}
    if method != "full":
        base["lora"] = adapters(q.spec)
    if method == "qlora":
        base["quantization"] = "nf4"
    fp8 = ALLOWED["fp8"] if "fp8" in q.allow and machines.gpu.peak("fp8") else (None,)
    for precision, compiled, eighth, checkpointing, kernels in product(
        q.options("precision", precisions), q.options("compile", (True, False)), q.options("fp8", fp8),
        q.options("checkpointing", (None, "selective", "full")),
        q.options("kernels", ALLOWED["kernels"] if "kernels" in q.allow else (None,)),
    ):  # fmt: skip
        if eighth and not (compiled and precision in ("bf16", "mixed-bf16")):
            continue
        yield {**base, "precision": precision, "compile": compiled, "fp8": eighth, "checkpointing": checkpointing,
               "kernels": kernels, **{name: q.fixed[name] for name in base if name in q.fixed}}  # fmt: skip


def adapters(spec: ModelSpec) -> LoRA:
    """Return LoRA adapters on queries and values. If a model projects these together with others, or under other names,
    return adapters on all layers that compute attention's inputs.

    >>> from llmlab.specs.model import model
    >>> adapters(model("gpt2"))
    LoRA(targets=('c_attn',))
    """
    names = [linear.name for linear in spec.block_linears if linear.part == "attention"]
    input_names = tuple(dict.fromkeys(name for name in names if name not in ("o_proj", "c_proj")))
    return LoRA() if set(LoRA.targets) <= set(input_names) else LoRA(targets=input_names)


def _degrees(q: Question, machines: Machines, seq_len: int) -> Iterator[tuple[int, int, int]]:
    sides, heads, layers = divisors(machines.total), q.spec.heads, q.spec.layers
    for tp in q.options("tp", [n for n in sides if n <= machines.per_node and heads % n == 0]):
        for pp in q.options("pp", [n for n in sides if n <= layers]):
            short = [n for n in sides if seq_len % n == 0 and (n == 1 or seq_len // n >= LEAST_TOKENS)]
            for cp in q.options("cp", short):
                dp, remainder = divmod(machines.total, tp * pp * cp)
                if not remainder and q.fixed.get("dp", dp) == dp:
                    yield tp, pp, cp


def _micro_batches(q: Question, batch: int, dp: int) -> Iterator[tuple[int, int]]:
    if batch % dp:
        return
    for micro_batch in q.options("micro_batch", divisors(batch // dp)):
        accumulation, remainder = divmod(batch // dp, micro_batch)
        if not remainder and q.fixed.get("accumulation", accumulation) == accumulation:
            yield micro_batch, accumulation


def _schedules(q: Question, pp: int, accumulation: int) -> Iterator[dict[str, Any]]:
    """Yield the stack and, for a pipeline with virtual stages as an option of the stack, the interleaved schedules."""
    if not q.stack.own_program:
        yield {}
        return
    yield {"stack": q.stack}
    if q.stack.virtual_pipeline == 1 and pp > 1 and accumulation % pp == 0:
        for chunks in divisors(q.spec.layers // pp)[1:] if q.spec.layers % pp == 0 else ():
            yield {"stack": replace(q.stack, virtual_pipeline=chunks)}


def shares(q: Question, machines: Machines, dp: int) -> Iterator[dict[str, Any]]:
    """Yield the fields of each share of `dp` data-parallel ranks; the optimizer only if it is fixed or varied.
    The ZeRO stage is left to torchtitan, which with context parallelism shards even if dp=1."""
    stage_is_open = not q.stack.chooses_zero or "zero" in q.fixed
    optimizers = ALLOWED["optimizer"] if "optimizer" in q.allow else (None,)
    experts = q.spec.experts
    eps = q.options("ep", [n for n in divisors(dp) if experts and experts % n == 0] or (1,))
    stages = (3,) if q.stack.chooses_zero and dp > 1 else (0, 1, 2, 3) if dp > 1 else (0,)
    offloads = q.options("offload", (None, "optimizer", "optimizer+parameters"))
    for optimizer, ep, offload in product(q.options("optimizer", optimizers), eps, offloads):
        if optimizer == "muon" and (offload or ep > 1):  # torch's Muon needs whole matrices on the GPU
            continue
        # Engines offload ZeRO's shards, even with one GPU.
        sharding_stages = stages if not offload else (3,) if offload == "optimizer+parameters" else (2,)
        for zero in q.options("zero", sharding_stages if optimizer != "muon" else (0,)):
            copies = [n for n in divisors(dp) if zero >= 2 and not offload and n < dp and dp // n % ep == 0] or (1,)
            for dp_replicate in q.options("dp_replicate", copies):
                chosen_optimizer = {"optimizer": optimizer} if optimizer else {}
                stage = {"zero": zero} if stage_is_open else {}
                yield {**chosen_optimizer, **stage, "ep": ep, "offload": offload, "dp_replicate": dp_replicate}
