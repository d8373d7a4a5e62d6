"""The other phase of PPO and GRPO: an engine on the same GPU generates the completions, and sleeps during training.

The phases are never summed. While the engine is awake, its share of the GPU's memory has its own copy of the weights
and the KV cache, beside the trained weights and the optimizer states. Asleep it gives both back (sleep mode frees what
is allocated under the tags "weights" and "kv_cache": vllm/device_allocator/cumem.py), but not its CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace

from ..base.notes import Note
from ..base.units import show_bytes, show_seconds
from ..hardware.gpu import GPU
from ..report import Report
from ..specs.model import ModelSpec
from ..specs.run import Training
from .load import latency
from .memory import Memory, divided_memory
from .report import TPOT_INTERVAL, checked
from .service import Service


def engine(run: Training) -> Service:
    """Return the engine of one GPU that generates an update's completions."""
    return Service(
        gpu_memory_utilization=run.gpu_memory_utilization,
        max_model_len=run.seq_len,
        prompt_len=run.seq_len - (run.completion_len or 0),
        output_len=run.completion_len or 1,
        prefix_hit=1 - 1 / run.generations,
        concurrency=run.sequences * run.accumulation,
    )


def with_generation(report: Report, spec: ModelSpec, run: Training, gpu: GPU) -> Report:
    """Return the `report` of an update with the phase before it, in which the engine generates."""
    service = checked(spec, engine(run), gpu)
    memory = divided_memory(spec, service, gpu)
    assert isinstance(memory, Memory)  # vLLM's
    trained = report.parts.get("weights", 0) + report.parts.get("optimizer", 0)
    awake, asleep = trained + memory.budget, memory.outside + memory.graphs
    outside = gpu.outside(run.world_size) or 0
    process = max(report.process + asleep, awake + outside) if report.process else None
    report = replace(report, phases={"generate": awake, **report.phases}, process=process)
    training = report.needed or (report.peak_allocated or 0) + outside
    least = max(training + asleep, awake + outside)
    if memory.requests < 1:
        short = show_bytes(memory.per_request - memory.cache)
        share = f"gpu_memory_utilization={run.gpu_memory_utilization:g}"
        where = f"generate (the engine with {share} lacks {short} for one sequence; raise it)"
        return replace(report, outcome="out of memory", where=where)
    if awake + outside > gpu.memory and report.outcome != "out of memory":
        report = replace(report, outcome="out of memory", where="generate (engine beside the trained model)")
    if least > gpu.memory:
        report = replace(report, outcome="out of memory", needed=least, process=None,
                         where=report.where or "backward (beside the sleeping engine)")  # fmt: skip
    if report.step_seconds is None:
        return report
    rate = latency(spec, service, gpu, memory).tokens_per_second
    count = run.sequences * run.accumulation
    seconds = count * service.output_len / rate
    total = report.step_seconds + seconds
    low, high = (bound and bound + factor * seconds for bound, factor in
                 zip((report.step_seconds_low, report.step_seconds_high), TPOT_INTERVAL, strict=True))  # fmt: skip
    equal = f"if all {count} completions of a GPU have {service.output_len:,} tokens"
    together = f"the engine's cache holds {memory.requests:,} of them together"
    note = Note("generation", f"Generation takes {show_seconds(seconds)} {equal}; {together}. The phases follow each "
                "other, so their memory is not summed.")  # fmt: skip
    return replace(
        report,
        time={"generation": seconds, **report.time},
        time_sources={"generation": "the engine's kernels (lab.serve)", **report.time_sources},
        step_seconds=total, step_seconds_low=low, step_seconds_high=high,
        tokens_per_second=report.tokens_per_second and report.tokens_per_second * report.step_seconds / total,
        mfu=report.mfu and report.mfu * report.step_seconds / total,
        notes=(*report.notes, note),
    )  # fmt: skip
