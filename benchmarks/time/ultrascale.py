"""The sweep behind the Ultra-Scale Playbook beside what llmlab estimates for every job of it.

    python -m benchmarks.time.ultrascale                           # prints the tables
    python -m benchmarks.time.ultrascale --out benchmarks/results  # and writes ultrascale.md
    python -m benchmarks.time.ultrascale --rows OTHER.csv          # of other rows with the same columns

ultrascale.csv is a random half, by model and outcome, of the authors' result file (bench_final2_mfu2.csv in
eyao600/Rapid-LLM at d6e2fc3): nanotron on 1 to 64 nodes of 8 H100s with EFA, bf16, sequences of 4,096 tokens, about
1M tokens per update, 1F1B, no recomputation, sequence parallelism wherever TP is above 1. `tok_s_gpu` is the third
step's speed, `mem_reserved_gib` torch's max_memory_reserved of rank 0, `mem_allocated_gib` the peak of the update,
`ar` the bus bandwidth in GB/s that the job's own all-reduce test reached over all its GPUs, `ar_in` within a node.

How a job is described was fixed beforehand (MODELS, `run_of`, `condition`); what nanotron does was corrected in view of
these rows. A job is healthy if its NVLink and its network passed their tests, and if its pipeline ran after nanotron's
pipeline was rewritten.

The jobs ran on two kinds of nodes: `ar_in` is below 436 GB/s on one and above 450 on the other. On the first kind, a
layer of a micro-batch never took less than about 9, 14, 20 and 45 ms with TP of 2, 4, 8 and 16, whether the model has
1B or 80B parameters. On the second, 4.5 ms is enough up to TP 8. The first kind is as slow as if each rank stalled for
2.4 ms per layer at another moment, and the other ranks of its TP group had to wait. We saw this after the comparison,
and do not know its cause (`host_seconds`).
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

import llmlab as lab
from benchmarks.provenance import provenance, titled_table, write
from llmlab.formulas.verdict import reserved_beside
from llmlab.hardware.links import cluster

ROWS = Path(__file__).with_suffix(".csv")
GPU, LENGTH, GIB = "H100-80GB", 4096, 2**30
# hidden, intermediate, heads, key/value heads, layers, and whether the head is the embedding
# (scripts/scaling_benchmarks.py)
MODELS = {
    "1B": (2048, 8192, 32, 32, 16, True),
    "3B": (3072, 8192, 32, 32, 28, True),
    "8B": (4096, 14336, 32, 32, 32, False),
    "80B": (8192, 28672, 64, 64, 80, False),
}
VOCABULARY = 131072
NVLINK, NETWORK = 400.0, 95.0  # GB/s that the tests of a healthy job reach within a node, and over all its GPUs
SECOND_KIND = 440.0  # GB/s within a node: more on the second kind of nodes, less on the first
HOST, HOST_OF_RANK = 4.7e-3, 2.4e-3  # s per layer and micro-batch on the first kind, and more for each rank of TP
HEALTHY, HEALTHY_WIDE = "healthy, TP ≤ 8", "healthy, TP > 8"
SLOW, OLD, SICK = "slow network", "before the pipeline's rewrite", "slow NVLink"
CLASSES = (HEALTHY, HEALTHY_WIDE, SLOW, OLD, SICK)


class Job(NamedTuple):
    """A job of the sweep, its run, and its estimates: as all know the nodes, and with the job's own network test.
    `report` is None where nanotron cannot cut the model into so many stages; `tested` where there was no test."""

    row: dict[str, str]
    run: lab.Training
    report: lab.Report | None
    tested: lab.Report | None

    @property
    def ran(self) -> bool:
        return self.row["status"] == "Success" and self.row["oom_error"] == "0"

    @property
    def out_of_memory(self) -> bool:
        return self.row["oom_error"] == "1" or self.row["status"] == "OOM"

    @property
    def reserved(self) -> float:
        """The bytes that rank 0's allocator is estimated to reserve, at most what tensors can use of the GPU."""
        assert self.report
        needed = self.report.peak_allocated + reserved_beside(model_of(self.row), self.run)
        return min(needed, lab.gpu(GPU).room(self.run.world_size))

    @property
    def host_seconds(self) -> float:
        """The least time that the slow host of the first kind of nodes takes for a step; 0 on the second kind."""
        if self.run.tp == 1 or float(self.row["ar_in"] or SECOND_KIND) >= SECOND_KIND:
            return 0.0
        layers = MODELS[self.row["model"]][4] / self.run.pp
        return (HOST + HOST_OF_RANK * self.run.tp) * layers * (self.run.accumulation + self.run.pp - 1)


def model_of(row: dict[str, str]) -> lab.ModelSpec:
    hidden, intermediate, heads, kv_heads, layers, tied = MODELS[row["model"]]
    return lab.model({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": tied,
    })  # fmt: skip


def run_of(row: dict[str, str]) -> lab.Training:
    sizes = {name: int(row[name]) for name in ("micro_batch", "dp", "tp", "pp", "zero")}
    return lab.Training(
        **sizes, accumulation=int(row["grad_accum"]), seq_len=LENGTH, sequence_parallel=sizes["tp"] > 1,
        stack="nanotron",
    )  # fmt: skip


def condition(row: dict[str, str]) -> str:
    """Return the class of a job that ran."""
    if row["pp"] != "1" and row["after_pp_fix"] != "1":
        return OLD
    if row["ar_in"] and float(row["ar_in"]) < NVLINK:
        return SICK
    if row["nodes"] != "1" and float(row["ar"] or 0) < NETWORK:
        return SLOW
    return HEALTHY if int(row["tp"]) <= 8 else HEALTHY_WIDE


def jobs(path: Path) -> list[Job]:
    nodes, every = cluster(GPU, "EFA-400", adapters=8), []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            spec = model_of(row)
            try:
                run = run_of(row)
                report = lab.estimate(spec, run, GPU, cluster=nodes)
            except lab.SpecError:  # more stages than nanotron's rule fills, or ZeRO-1 with one rank
                every.append(Job(row, lab.Training(), None, None))
                continue
            tested = None
            if row["nodes"] != "1" and row["ar"]:
                rate = min(nodes.adapters * nodes.across.reached, float(row["ar"]) * 1e9)
                own = cluster(GPU, "EFA-400", adapters=8, reached_across=rate)
                tested = lab.estimate(spec, run, GPU, cluster=own)
            every.append(Job(row, run, report, tested))
    return every


def rate(job: Job, seconds: float) -> float:
    """Return the tokens/s per GPU of a job whose step takes so long."""
    return job.run.global_batch * LENGTH / job.run.world_size / seconds


def errors(group: Iterable[Job], tested: bool = False, host: bool = False) -> list[float]:
    """Return the relative errors of tokens/s per GPU: also with the job's own network test, and with its slow host."""
    found = []
    for job in group:
        report = job.tested or job.report if tested else job.report
        if report and report.step_seconds:
            seconds = max(report.step_seconds, job.host_seconds if host else 0.0)
            found.append(rate(job, seconds) / float(job.row["tok_s_gpu"]) - 1)
    return found


def inside(job: Job) -> bool:
    assert job.report and job.report.step_seconds_low and job.report.step_seconds_high
    slow, fast = (rate(job, seconds) for seconds in (job.report.step_seconds_high, job.report.step_seconds_low))
    return slow <= float(job.row["tok_s_gpu"]) <= fast


def shown(relative: Sequence[float]) -> list[str]:
    """Return the median and the 90th percentile of absolute errors, and the median of signed ones."""
    sizes = sorted(map(abs, relative))
    return [f"{median(sizes):.1%}", f"{sizes[ceil(0.9 * len(sizes)) - 1]:.0%}", f"{median(relative):+.1%}"]


def speeds(done: list[Job]) -> list[str]:
    groups: dict[str, list[Job]] = {name: [job for job in done if condition(job.row) == name] for name in CLASSES}
    first, second = [], []
    for job in groups[HEALTHY]:
        (second if float(job.row["ar_in"] or 0) >= SECOND_KIND else first).append(job)
    kinds = {f"{HEALTHY}, NVLink test {where} {SECOND_KIND:.0f} GB/s": group
             for where, group in (("above", second), ("below", first))}  # fmt: skip
    groups = {HEALTHY: groups.pop(HEALTHY), **kinds, **groups}
    groups["of all, above 20 % MFU"] = [job for job in done if float(job.row["mfu"]) > 20]
    rows = []
    for name, group in groups.items():
        if group:
            afterwards = [f"{median(map(abs, errors(group, tested=True, host=host))):.1%}" for host in (False, True)]
            held = f"{sum(map(inside, group)) / len(group):.0%}"
            rows.append([name, str(len(group)), *shown(errors(group)), held, *afterwards])
    header = ["jobs", "number", "median error", "90th percentile", "signed", "inside the 80 % interval",
              "median with the job's own network test", "and with the minimum time of a layer"]  # fmt: skip
    return titled_table("Tokens per second", header, rows)


def memory(done: list[Job]) -> list[str]:
    measures: dict[str, tuple[str, Callable[[Job], float], Callable[[Job], bool]]] = {
        "allocated in the update, ZeRO 0": ("mem_allocated_gib", _update, lambda job: job.run.zero == 0),
        "allocated in the update, ZeRO 1": ("mem_allocated_gib", _update, lambda job: job.run.zero == 1),
        "reserved": ("mem_reserved_gib", lambda job: job.reserved, lambda job: True),
    }
    rows = []
    for name, (column, estimate, chosen) in measures.items():
        group = [job for job in done if job.row[column] and chosen(job)]
        relative = [estimate(job) / GIB / float(job.row[column]) - 1 for job in group]
        rows.append([name, str(len(group)), *shown(relative)])
    header = ["memory of rank 0", "number", "median error", "90th percentile", "signed"]
    return titled_table("Memory", header, rows)


def _update(job: Job) -> float:
    assert job.report
    return job.report.phases["optimizer"]


def outcomes(every: list[Job]) -> tuple[list[str], Counter[tuple[str, str]]]:
    counts: Counter[tuple[str, str]] = Counter()
    for job in every:
        if job.report and (job.ran or job.out_of_memory):
            counts["ran" if job.ran else "ran out of memory", job.report.outcome] += 1
    verdicts = ("fits", "unknown", "out of memory")
    rows = [[real, *[str(counts[real, verdict]) for verdict in verdicts]] for real in ("ran", "ran out of memory")]
    return titled_table("Outcomes", ["the job", *[f"estimated: {verdict}" for verdict in verdicts]], rows), counts


def choices(done: list[Job]) -> tuple[str, float]:
    """Return how often the layout that is estimated to be the fastest is within 10 % of the fastest one, among healthy
    jobs of a model on a number of nodes."""
    groups: dict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in done:
        if condition(job.row) in (HEALTHY, HEALTHY_WIDE):
            groups[job.row["model"], job.row["nodes"]].append(job)
    near = total = 0
    luck = 0.0
    for group in groups.values():
        if len(group) < 3:
            continue
        first = max(group, key=lambda job: job.report.tokens_per_second if job.report else 0.0)
        enough = 0.9 * max(float(job.row["tok_s_gpu"]) for job in group)
        total += 1
        near += float(first.row["tok_s_gpu"]) >= enough
        luck += sum(float(job.row["tok_s_gpu"]) >= enough for job in group) / len(group)
    where = "models and numbers of nodes with at least three healthy jobs"
    text = f"**Choice.** In {near} of {total} {where}, the fastest estimate is within 10 % of the fastest job. "
    text += f"A random choice would be in {luck / total:.0%}."
    return text, near / total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="rows with the columns of ultrascale.csv")
    parser.add_argument("--out", type=Path, help="folder for ultrascale.md")
    given = parser.parse_args()
    every = jobs(given.rows)
    done = [job for job in every if job.ran and job.report]
    decided, counts = outcomes(every)
    chosen, share = choices(done)
    refused = Counter(job.row["status"] for job in every if not job.report)
    left = ", ".join(f"{count} with status {status}" for status, count in sorted(refused.items()))
    notes = f"{len(every):,} jobs. Not expressible: {left or 'none'}."
    lines = [*speeds(done), "", *memory(done), "", *decided, "", chosen, "", f"{notes} {provenance('llmlab')}"]
    text = "\n".join(lines)
    print(text)
    if given.out:
        write(given.out / "ultrascale.md", text)
    healthy = [abs(error) for error in errors(job for job in done if condition(job.row) == HEALTHY)]
    false = counts["ran", "out of memory"], counts["ran out of memory", "fits"]
    enough = false[0] == 0 and false[1] <= 0.01 * sum(n for (real, _), n in counts.items() if real != "ran")
    return 0 if median(healthy) <= 0.08 and enough and share >= 0.85 else 1


if __name__ == "__main__":
    sys.exit(main())
