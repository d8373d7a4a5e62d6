"""The other phase of PPO and GRPO: an engine on the same GPU generates the completions, and sleeps during training.

The phases are never summed. While the engine is awake, its share of the GPU's memory has its own copy of the weights
and the KV cache, beside the trained weights and the optimizer states. Asleep it gives both back (sleep mode frees what
is allocated under the tags "weights" and "kv_cache": vllm/device_allocator/cumem.py), but not its CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, expm1, log, log1p

from ..base.notes import Note
from ..base.units import show_bytes, show_seconds
from ..hardware.gpu import GPU
from ..report import Report
from ..specs.model import ModelSpec
from ..specs.run import Training
from .load import SEED, simulate
from .memory import Memory, divided_memory
from .replay import Arrival
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


def completion_lengths(count: int, mean: float, longest: int) -> list[int]:
    """Return the lengths of `count` completions: each token ends a completion with the same probability p, and the
    engine ends it after `longest` tokens, so the mean is (1 - (1 - p)^longest) / p.

    The lengths are evenly spaced quantiles of this distribution, in random order.
    """
    low, high = 0.0, 1.0  # of p, by bisection
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if -expm1(longest * log1p(-p)) / p > mean else (low, p)
    lasts = [log((place + 0.5) / count) / log1p(-high) if high < 1 else 1.0 for place in range(count)]
    lengths = [min(longest, max(1, ceil(tokens))) for tokens in lasts]
    random.Random(SEED).shuffle(lengths)
    return lengths


def generation_seconds(spec: ModelSpec, service: Service, gpu: GPU, memory: Memory, lengths: Sequence[int]) -> float:
    """Return the seconds until the last completion is finished, if the engine has all prompts at the start."""
    requests = [Arrival(0.0, service.prompt_len, length) for length in lengths]
    return max(one.tokens[-1] for one in simulate(spec, service, gpu, memory, requests))


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
    count = run.sequences * run.accumulation
    lengths = completion_lengths(count, run.mean_completion_len or service.output_len, service.output_len)
    seconds = generation_seconds(spec, service, gpu, memory, lengths)
    total = report.step_seconds + seconds
    low, high = (bound and bound + factor * seconds for bound, factor in
                 zip((report.step_seconds_low, report.step_seconds_high), TPOT_INTERVAL, strict=True))  # fmt: skip
    tokens, those = f"{service.output_len:,} tokens", "of them"
    if run.mean_completion_len:
        tokens, those = f"{run.mean_completion_len:,} tokens on average, and {max(lengths):,} at most", "of the longest"
    takes = f"Generation takes {show_seconds(seconds)} if all {count} completions of a GPU have {tokens}"
    note = Note("generation", f"{takes}; the engine's cache holds {memory.requests:,} {those} together. The phases "
                "follow each other, so their memory is not summed.")  # fmt: skip
    return replace(
        report,
        time={"generation": seconds, **report.time},
        time_sources={"generation": "the engine's kernels (lab.serve)", **report.time_sources},
        step_seconds=total, step_seconds_low=low, step_seconds_high=high,
        tokens_per_second=report.tokens_per_second and report.tokens_per_second * report.step_seconds / total,
        mfu=report.mfu and report.mfu * report.step_seconds / total,
        notes=(*report.notes, note),
    )  # fmt: skip
