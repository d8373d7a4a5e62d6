"""Changes that make a run fit, one at a time, with the bytes each saves and the time it costs.

Everything is computed by formulas, so that a page in the browser can use it. The changes are the book's techniques.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..base.errors import SpecError
from ..base.tables import Table, Tabular
from ..base.units import GiB, show_bytes, show_seconds
from ..base.version import BOOK
from ..formulas.memory.share import attention_kernel
from ..formulas.report import assessed
from ..formulas.time.step import tokens_of
from ..formulas.verdict import Verdict
from ..hardware.gpu import GPU
from ..hardware.gpu import gpu as find_gpu
from ..hardware.links import Cluster
from ..report import Report, summary
from ..simulation.deriving import trace_of
from ..specs.check import has_formulas
from ..specs.generic import attentions
from ..specs.model import ModelLike, ModelSpec
from ..specs.model import model as find_model
from ..specs.run import Inference, Run, Training
from .space import adapters

Estimate = Callable[[ModelSpec, Run, GPU, Cluster | None], tuple[Report, Verdict]]
DATA_PARALLEL = 8  # GPUs that a lever suggests for a run on one


class Change(NamedTuple):
    """A change of a run: the `fields` that it sets, and the page of the book about it (`chapter`). `same_result`:
    whether the trained model is the same except for rounding."""

    name: str
    chapter: str
    fields: dict[str, Any]
    same_result: bool


@dataclass(frozen=True)
class Lever:
    """A change that saves memory: `run` is the changed run, and `report` its estimate.

    `saves`: bytes per GPU. `seconds`: how much longer the tokens that one GPU processes in a step take (negative if
    shorter); None if a time is not known. The other fields are those of `Change`.
    """

    name: str
    chapter: str
    run: Run
    report: Report
    saves: int
    seconds: float | None
    same_result: bool

    @property
    def price(self) -> float:
        """Added seconds per step and GiB saved: 0 if the change costs no time, infinity if the time is not known."""
        return float("inf") if self.seconds is None else max(self.seconds, 0.0) / (self.saves / GiB)


@dataclass(frozen=True, repr=False)
class Fix(Tabular):
    """The levers of one run, the cheapest GiB first; `report` is the estimate of the run as it is."""

    report: Report
    levers: tuple[Lever, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values: the run's report, and each lever with its report, savings and cost."""
        levers = [
            {
                "name": lever.name, "chapter": lever.chapter, "outcome": lever.report.outcome, "saves": lever.saves,
                "seconds": lever.seconds, "same_result": lever.same_result, "report": lever.report.to_dict(),
            }
            for lever in self.levers
        ]  # fmt: skip
        return {"report": self.report.to_dict(), "levers": levers}

    def _table(self) -> Table:
        rows = [
            (
                lever.name, show_bytes(lever.saves), cost(lever, self.report), lever.report.outcome,
                "yes" if lever.same_result else "no", lever.chapter,
            )
            for lever in self.levers
        ]  # fmt: skip
        r = self.report
        title = f"{r.title}: {summary(r.run)}; {r.outcome}, peak allocated {show_bytes(r.peak_allocated)}"
        lines = [
            "Each row is an estimate of one change. Changes that cost no time come first; among them, changes that "
            "keep the result come before changes that alter it. The other rows are sorted by time per GiB saved.",
            "Same result: the weights get the same updates except for rounding. More GPUs also enlarge the global "
            "batch, which changes the result.",
        ]
        unknown = any(lever.report.outcome == "unknown" for lever in self.levers)
        if unknown:
            lines.append("Unknown: the estimate is too close to the GPU's memory to decide; run `llmlab simulate`.")
        if not any(lever.report.outcome == "fits" for lever in self.levers):
            makes = "is certain to make" if unknown else "makes"
            lines.append(f"No single change {makes} this run fit. Combine several, or search with `llmlab plan`.")
        assumed = (note for note in self.report.notes if note.code == "gpu-memory-assumed")
        footer = "\n".join([*lines, *assumed])
        time = "change in time for the same number of tokens"
        header = ("change", "saves per GPU", time, "outcome", "same result", "chapter")
        links = {lever.chapter: f"{BOOK}/{lever.chapter}.html" for lever in self.levers}
        return Table(header, rows, title, footer, (0, 3, 4, 5), links)

    def __repr__(self) -> str:
        return f"<Fix: {self.report.title}: {len(self.levers)} levers>"


def cost(lever: Lever, before: Report) -> str:
    """Return by how much a lever changes the time of a step, as text."""
    if lever.seconds is None or before.step_seconds is None:
        return "unknown"
    share = lever.seconds / before.step_seconds
    return f"{'+' if lever.seconds >= 0 else '−'}{show_seconds(abs(lever.seconds))} ({share:+.0%})".replace("-", "−")


def fix(
    model: ModelLike, run: Run, gpu: GPU | str, cluster: Cluster | None = None, estimate: Estimate = assessed
) -> Fix:
    """Return the changes that reduce the memory of `run` of `model` on `gpu`; see `lab.fix`. `estimate` computes every
    report."""
    spec, device = find_model(model), find_gpu(gpu)
    report, fit = estimate(spec, run, device, cluster)
    tried = (_lever(spec, device, cluster, estimate, report, fit, change) for change in changes(spec, run, device))
    levers = filter(None, tried)
    return Fix(report, tuple(sorted(levers, key=lambda lever: (lever.price, not lever.same_result, -lever.saves))))


def derived(
    spec: ModelSpec, run: Run, device: GPU | str | None, cluster: Cluster | None = None
) -> tuple[Report, Verdict]:
    """Return `assessed`; for a step without written formulas, they are derived first."""
    trace = trace_of(spec, run, device) if device is not None and not has_formulas(spec, run) else None
    return assessed(spec, run, device, cluster, trace)


def _lever(
    spec: ModelSpec,
    device: GPU,
    cluster: Cluster | None,
    estimate: Estimate,
    before: Report,
    fit: Verdict,
    change: Change,
) -> Lever | None:
    """Return the lever that makes `change`; None if the model or GPU does not support it, or if it saves nothing."""
    try:
        run = replace(before.run, **change.fields)
        report, after = estimate(spec, run, device, cluster)
    except SpecError:
        return None
    saves = fit.least - after.least  # of the fullest stage of a pipeline
    if saves <= 0:
        return None
    seconds = None
    if report.step_seconds and before.step_seconds:
        share = _tokens_per_gpu(before.run) / _tokens_per_gpu(run)
        seconds = report.step_seconds * share - before.step_seconds
    return Lever(change.name, change.chapter, run, report, saves, seconds, change.same_result)


def _tokens_per_gpu(run: Run) -> float:
    return tokens_of(run) / run.world_size


def changes(spec: ModelSpec, run: Run, device: GPU) -> Iterator[Change]:
    """Yield each change of `run` that may save memory."""
    if isinstance(run, Inference):
        yield from _serving(run)
        return
    if run.attention in ("eager", "sdpa"):
        # Where SDPA has no fused kernel for grouped heads, as on a T4, they are repeated.
        repeats = attention_kernel(spec, replace(run, attention="sdpa"), device) == "math"
        if repeats and "efficient" in attentions(spec.family):
            yield Change("fused attention, heads repeated", "10-flash-attention", {"attention": "efficient"}, True)
        elif run.attention == "eager":
            yield Change("fused attention", "10-flash-attention", {"attention": "sdpa"}, True)
    if run.kernels is None:
        yield Change("fused kernels (Liger)", "09-kernels", {"kernels": "liger"}, True)
    if run.optimizer == "adamw":
        yield Change("fused AdamW", "07-optimizers", {"optimizer": "adamw-fused"}, True)
    if run.checkpointing is None:
        yield Change("selective checkpointing", "08-checkpointing", {"checkpointing": "selective"}, True)
    if run.checkpointing != "full":
        yield Change("full checkpointing", "08-checkpointing", {"checkpointing": "full"}, True)
    if run.micro_batch > 1:
        half = {"micro_batch": run.micro_batch // 2, "accumulation": run.accumulation * 2}
        if run.micro_batch % 2 == 0:
            yield Change("half the micro-batch, twice the accumulation", "06-accumulation", half, True)
        single = {"micro_batch": 1, "accumulation": run.accumulation * run.micro_batch}
        if run.micro_batch > 2:
            yield Change(f"micro-batch 1, accumulation {single['accumulation']}", "06-accumulation", single, True)
    if not run.sync_each_batch:
        yield Change("reduce gradients after each micro-batch", "12-zero", {"sync_each_batch": True}, True)
    yield from _many_gpus(run)
    if run.offload is None:
        offloaded = {"offload": "optimizer", "zero": max(run.zero, 1)}
        yield Change("optimizer states in host memory", "13-offload", offloaded, True)
    yield from _other_results(spec, run, device)


def _many_gpus(run: Training) -> Iterator[Change]:
    if run.dp == 1 and run.tp == run.pp == run.cp == 1:
        yield Change(f"ZeRO-3 over {DATA_PARALLEL} GPUs", "12-zero", {"dp": DATA_PARALLEL, "zero": 3}, False)
    for stage in range(run.zero + 1, 4):
        if run.dp > 1:
            yield Change(f"ZeRO-{stage}", "12-zero", {"zero": stage}, True)
    if run.tp > 1 and not run.sequence_parallel:
        yield Change("sequence parallelism", "14-tensor-and-sequence-parallel", {"sequence_parallel": True}, True)
    if run.dp % 2 == 0 and run.dp > 1 and run.ep == 1:
        split = {"dp": run.dp // 2, "tp": run.tp * 2, "micro_batch": run.micro_batch * 2}
        if run.zero and run.dp == 2:
            split["zero"] = 0
        name = "half the data-parallel ranks, twice the tensor-parallel"
        yield Change(name, "14-tensor-and-sequence-parallel", split, True)


def _other_results(spec: ModelSpec, run: Training, device: GPU) -> Iterator[Change]:
    half = "bf16" if device.supports_bf16 else "fp16"
    if run.precision == "fp32":
        yield Change(f"autocast to {half}", "04-precision", {"precision": f"autocast-{half}"}, False)
    if run.precision.startswith(("autocast", "mixed")) and run.lora is None:
        yield Change(f"weights in {half}, no fp32 copy", "04-precision", {"precision": half}, False)
    if run.optimizer in ("adamw", "adamw-fused"):
        yield Change("8-bit AdamW", "07-optimizers", {"optimizer": "adamw-8bit"}, False)
        yield Change("Adafactor", "07-optimizers", {"optimizer": "adafactor"}, False)
    if run.lora is None:
        yield Change("LoRA of rank 16", "18-peft", {"lora": adapters(spec)}, False)
    if run.quantization is None:
        nf4 = {"lora": run.lora or adapters(spec), "quantization": "nf4"}
        if run.precision in ("bf16", "fp16"):  # peft casts the norms and the head to fp32; the Trainer adds autocast
            nf4["precision"] = f"autocast-{run.precision}"
        yield Change("QLoRA (base weights in NF4)", "18-peft", nf4, False)
    if run.seq_len > 256:
        yield Change("half the sequence length", "02-memory-anatomy", {"seq_len": run.seq_len // 2}, False)


def _serving(run: Inference) -> Iterator[Change]:
    for weights in ("int8", "nf4"):
        if run.weights not in ("int8", "nf4"):
            yield Change(f"weights in {weights}", "19-quantization", {"weights": weights}, False)
    for kv in ("fp8", "int8", "int4"):
        if run.kv not in ("fp8", "int8", "int4"):
            yield Change(f"KV cache in {kv}", "21-kv-cache", {"kv": kv}, False)
    if run.batch > 1:
        yield Change("half the prompts at once", "22-serving", {"batch": run.batch // 2}, True)
    yield Change("tensor parallelism over twice the GPUs", "14-tensor-and-sequence-parallel", {"tp": run.tp * 2}, True)
