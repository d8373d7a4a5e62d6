"""How good a plan's two answers are on published runs: what fits, and which of several ways is the fastest.

    python -m benchmarks.plans.plans                           # prints; about a quarter of an hour on two cores
    python -m benchmarks.plans.plans --out benchmarks/results  # and writes plans.md
    python -m benchmarks.plans.plans --estimates               # without simulations: seconds

A stack's steps are simulated with its own packages, of `make stacks`; without these they are left open.

Fits: published steps that ran (throughputs.toml, and the archive's on a T4) and steps that ran out of memory (`OVER`,
and the archive's). A plan says "fits" where the estimate leaves room for all that may come on top, or where the
simulation fits with MARGIN of the card left free (llmlab/planning/confirm.py); what neither decides it does not show.

Choice: where a source measured the same model in several ways on the same GPUs, what the estimate says is the fastest,
beside what was. Between full fine-tuning, LoRA and QLoRA, which give different models, a plan chooses only where allow=
lists them: these have a table of their own. Megatron-LM's two kinds of recomputation count too, of
which no memory is published. A step's tokens count, not its sequences. Margin: what the steps of held_out.md, on a T4,
reserved more than their simulation, over the card. Search: how long it takes here; no test asserts it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

import llmlab as lab
from benchmarks.provenance import provenance, titled_table, write
from benchmarks.time.throughput import predict
from benchmarks.time.throughput_rows import ROWS, UNSEEN, Row, iterations, published, tomllib
from llmlab.archive import held_out, records
from llmlab.base.units import MiB
from llmlab.formulas.report import assessed
from llmlab.planning.confirm import MARGIN, NotSimulated, simulated_run
from llmlab.planning.files.write import program
from llmlab.planning.machines import machines, priced
from llmlab.planning.search import Search
from llmlab.planning.space import Question
from llmlab.specs.run import stack_of

STACKS = Path(__file__).parents[2] / "_build" / "stacks"  # where `make stacks` puts them; peft refuses their torchao
HELD_OUT = Path(__file__).parents[1] / "results" / "held_out.md"
FITS, NOT, UNSURE = "fits", "does not fit", "cannot tell"
NEAR = 1.10  # how much slower than the best measured the first choice may be
CANDIDATES, SECONDS_BAR = 100_000, 10.0  # on two cores; the search takes one
SHOWN = 60  # candidates that are taken of a search: what a plan takes of them


@dataclass(frozen=True)
class Case:
    """A published step on a card, and whether it ran."""

    id: str
    what: str
    model: str | dict[str, Any]
    run: lab.Training
    card: str
    ran: bool
    uncertain: str = ""  # why nobody can know what memory it took


BIGSCIENCE = "megatron:deepspeed=true,transformer_engine=false"
QWEN = {"seq_len": 4096, "precision": "mixed-bf16", "zero": 3, "checkpointing": "full"}
# Runs on other cards that ran out of memory, where the source says all that decides. Lit-GPT: Alpaca's longest sample
# has 1304 tokens. BLOOM's prequel: 181B parameters, as the model of 72 layers in throughputs.toml. BigScience's
# 1.3B (experiments/tr3m-1B3.md): as the rows of that source there; so are arXiv 2311.05610's (aleph), all that the rule
# of its rows takes, fms-acceleration's QLoRA of 70B, and FlagPerf's Llama 3 8B without model parallelism
# (training/nvidia/llama3_8B-megatron/README.md).
OVER = (
    ("oom-006", "Lit-GPT, resource-tables.md: LoRA, 4 × 1304", "meta-llama/Llama-2-7b-hf", "A100-40GB",
     lab.Training(micro_batch=4, seq_len=1304, precision="bf16", lora=lab.LoRA(8))),
    ("oom-007", "Lit-GPT, resource-tables.md: LoRA, 2 × 1304", "meta-llama/Llama-2-13b-hf", "A100-40GB",
     lab.Training(micro_batch=2, seq_len=1304, precision="bf16", lora=lab.LoRA(8))),
    ("oom-009", "torchtitan #1690: FSDP16, 8 × 4096", "Qwen/Qwen3-32B", "H100-96GB",
     lab.Training(micro_batch=8, dp=16, **QWEN)),
    ("oom-010", "torchtitan #1690: FSDP8 × TP4, 32 × 4096", "Qwen/Qwen3-32B", "H100-96GB",
     lab.Training(micro_batch=32, dp=8, tp=4, sequence_parallel=True, **QWEN)),
    ("oom-011", "BLOOM's prequel: DP48 TP8, 1 × 2048", "GPT-72x14336", "A100-80GB",
     lab.Training(micro_batch=1, seq_len=2048, accumulation=42, precision="mixed-fp16", checkpointing="full", zero=1,
                  dp=48, tp=8, attention="eager", stack=BIGSCIENCE)),
    *((f"oom-{number:03}", f"BigScience's 1.3B: DP{8 // pp} PP{pp}, {size} × 2048", "GPT-24x2048", card,
       lab.Training(micro_batch=size, seq_len=2048, accumulation=512 * pp // (8 * size), zero=1 if pp < 8 else 0, pp=pp,
                    dp=8 // pp, precision="mixed-fp16", checkpointing="full", attention="eager", stack=BIGSCIENCE))
      for number, card, pp, size in ((12, "V100-32GB", 2, 16), (13, "V100-16GB", 2, 8), (14, "V100-16GB", 4, 8),
                                     (15, "V100-16GB", 8, 8))),
    *((f"aleph-{size.lower()}-{length}-tp{tp}-pp{pp}",
       f"arXiv 2311.05610: {gpus} GPUs, DP{gpus // (tp * pp)} TP{tp} PP{pp}, 1 × {length}", f"LLaMA-{size}-128k",
       "A100-80GB",
       lab.Training(micro_batch=1, seq_len=length, accumulation=batch * tp * pp // gpus, zero=1, dp=gpus // (tp * pp),
                    tp=tp, pp=pp, loss_parallel=tp == 1, precision="mixed-bf16", attention="flash"))
      for size, gpus, length, batch, layouts in (
          ("13B", 64, 2048, 2048, ((1, 1),)),
          ("13B", 128, 8192, 512, ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))),
          ("30B", 256, 2048, 2048, ((1, 1), (1, 2), (1, 4), (2, 1))),
          ("30B", 128, 8192, 512, tuple((tp, pp) for tp in (2, 4) for pp in (2, 4, 8, 16))),
          ("65B", 128, 2048, 2048, ((2, 2), (2, 4), (4, 2)))) for tp, pp in layouts),
    *((f"fms-acc-70b-qlora-{dp}-{size}", f"fms-acceleration: QLoRA on {dp}, {size} × 4096", "meta-llama/Llama-2-70b-hf",
       "A100-80GB",
       lab.Training(micro_batch=size, seq_len=4096, precision="autocast-bf16", quantization="nf4", attention="flash",
                    checkpointing="full", dp=dp, zero=3 if dp > 1 else 0,
                    lora=lab.LoRA(16, ("q_proj", "k_proj", "v_proj", "o_proj"), alpha=16, dropout=0.1)))
      for dp, size in ((1, 4), (1, 8), (2, 4))),
    ("flagperf-8b-a800-tp1-pp1", "FlagPerf: Megatron-Core, DP8, 1 × 8192", "Llama-3-8B-biases", "A800-80GB",
     lab.Training(micro_batch=1, seq_len=8192, accumulation=64, zero=1, dp=8, precision="mixed-bf16", attention="flash",
                  stack="megatron")),
)  # fmt: skip


def cases() -> list[Case]:
    """Return the published steps, those on many GPUs and other cards first, then the archive's on a T4."""
    models = tomllib.loads(ROWS.read_text(encoding="utf-8"))["models"]
    found = [Case(each.id, each.shown, each.model, each.held or each.run, each.card, True, each.uncertain)
             for each in published()]  # fmt: skip
    found += [Case(id_, what, models.get(name, name), run, card, False) for id_, what, name, card, run in OVER]
    steps = [each for each in records(gpu="T4", source="published") if isinstance(each.run, lab.Training)]
    for number, each in enumerate(steps):
        kind = "held out" if held_out(each) else "in view"
        what = f"{each.model.rpartition('/')[2]}, {each.run.micro_batch} × {each.run.seq_len}, {kind}"
        found.append(Case(f"t4-{number:03}", what, each.model, each.run, "T4", each.outcome == "fits"))
    return found


def decided(case: Case, simulate: bool = True) -> tuple[str, str]:
    """Return what a plan says of a step, and by which of its answers."""
    spec = lab.model(case.model)
    _, fit = assessed(spec, case.run, case.card, None)
    if fit.outcome != "unknown":  # out of memory also where a compiled step counts as an eager one: a plan cuts it
        return FITS if fit.outcome == "fits" else NOT, "estimate"
    answer = simulated_run(spec.config, case.run, case.card) if simulate and not case.uncertain else ""
    if isinstance(answer, str):
        return UNSURE, "estimate"
    return FITS if answer.outcome == "fits" else NOT, "simulation"


def verdicts(found: Sequence[tuple[Case, tuple[str, str]]], simulate: bool) -> Iterator[str]:
    """Return the tables of what fits, the misses by name, and by name those of which nobody can know."""
    how = "" if simulate else ", by estimates alone"
    certain = [each for each in found if not each[0].uncertain]
    lines = []
    for where, of in (("on a T4", (True,)), ("elsewhere", (False,)), ("anywhere", (True, False))):
        for ran in (True, False):
            some = [said for case, (said, _) in certain if (case.card == "T4") in of and case.ran == ran]
            lines.append(_counted(f"{'ran' if ran else 'ran out of memory'}, {where}", some))
    every = [said for case, (said, _) in found if case.ran]
    lines.append(_counted("ran, with those whose memory is not certain", every))
    yield from titled_table(f"What fits{how}", ["published steps", "", f"said: {FITS}", NOT, UNSURE], lines)
    missed = [[case.id, case.what, "ran" if case.ran else "ran out", said, by] for case, (said, by) in certain
              if said != (FITS if case.ran else NOT)]  # fmt: skip
    title = f"Steps for which the plan's answer differs from the outcome{how}"
    yield from titled_table(title, ["", "step", "it", "said", "by"], missed, True)
    open_ones = [[case.id, case.what, case.uncertain, said, by] for case, (said, by) in found if case.uncertain]
    yield from titled_table("Not certain, and not counted", ["", "step", "why", "said", "by"], open_ones, True)


def _counted(what: str, said: Sequence[str]) -> list[str]:
    """Return a line of the table of what fits: how many, and what was said of them."""
    return [what, str(len(said)), *(f"{said.count(word)} ({said.count(word) / len(said):.0%})" for word in
                                    (FITS, NOT, UNSURE))]  # fmt: skip


def excess() -> list[float]:
    """Return what each step of held_out.md reserved more than its simulation, over the T4's memory, in order."""
    card, found = lab.gpu("T4").memory / MiB, []
    for line in HELD_OUT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 9 and "×" in cells[1] and cells[5][:1].isdigit():
            simulated = float(cells[6].replace(",", ""))
            found += [(float(each.replace(",", "")) - simulated) / card for each in cells[5].split("/")]
    return sorted(found)


def margin() -> Iterator[str]:
    """Return the derivation of MARGIN: what 9 in 10 steps are below, in whole percents."""
    more = excess()
    shares = (0.5, 0.8, 0.9, 0.95)
    cells = [f"{more[int(share * len(more))]:+.2%}" for share in shares]
    header = ["steps", *(f"{share:.0%} are below" for share in shares), "the most", "MARGIN"]
    title = "Reserved bytes of fine-tuning steps: measured minus simulated, over the T4's memory"
    yield from titled_table(title, header, [[str(len(more)), *cells, f"{more[-1]:+.2%}", f"{MARGIN:.0%}"]])


def method(row: Row) -> str:
    """Return the method of a row's run, as a plan is asked for it."""
    return "full" if not row.run.lora else "qlora" if row.run.quantization else "lora"


def alternatives(told: bool = True) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows that measure the same model on the same GPUs at one length, in more than one way: of one method
    that was `told`, or of several."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in [*(row for row in published() if row.group != UNSEEN), *iterations()]:
        key = row.citation, row.label, row.card, row.run.world_size, row.run.seq_len, method(row) if told else ""
        groups.setdefault(key, []).append(row)
    if told:
        return {key: of for key, of in groups.items() if len({row.run for row in of}) > 1}
    return {key: of for key, of in groups.items() if len({method(row) for row in of}) > 1}


def choices(told: bool = True) -> Iterator[str]:
    """Return the table of first choices: predicted rates put the rows in order, measured ones say what it cost."""
    lines, near, known, luck = [], 0, 0, 0.0
    for (citation, label, card, many, length, how), of in alternatives(told).items():
        predicted = {row.id: predict(row).rate for row in of}
        best = max(of, key=lambda row: row.measured)
        asked = [row for row in of if predicted[row.id]]
        if not asked:
            continue
        top = max(predicted[row.id] or 0 for row in asked)
        # Rows that no field tells apart have one prediction: which of them ran as described is not known.
        chosen = min((row for row in asked if predicted[row.id] == top), key=lambda row: row.measured)
        slower = best.measured / chosen.measured
        known, near = known + 1, near + (slower <= NEAR)
        luck += sum(best.measured / row.measured <= NEAR for row in of) / len(of)
        what = f"{label}{f', {how}' if how in ('lora', 'qlora') else ''}, {many} × {card}, {length:,} tokens"
        what += f" ({citation.split(',')[0]})"
        miss = "" if slower <= NEAR else "MISSED"
        lines.append([what, str(len(of)), chosen.id, best.id, f"{slower - 1:.1%}", miss])
    title = f"First choice within {NEAR - 1:.0%} of the fastest measured: {near} of {known} ({near / known:.0%}; "
    title += f"{luck / known:.0%} if chosen at random)"
    if not told:
        title = "Between methods, which a plan varies only where allow= lists them, "
        title += f"the fastest within {NEAR - 1:.0%}: {near} of {known}"
    header = ["the same model on the same GPUs", "ways", "chosen", "fastest", "slower", ""]
    yield from titled_table(title, header, lines)


# What people ask, as files are written for its answer: model, GPUs, sequences per update, tokens of one, and more.
ASKED: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("gpt2", "T4", 32, 1024, {}),
    ("HuggingFaceTB/SmolLM2-360M", "T4", 32, 1024, {}),
    ("HuggingFaceTB/SmolLM2-1.7B", "T4", 32, 1024, {"method": "lora"}),
    ("meta-llama/Llama-3.1-8B", "T4", 16, 1024, {"method": "qlora", "allow": ("kernels",)}),
    ("meta-llama/Llama-3.1-8B", "RTX-4090", 16, 2048, {"method": "qlora"}),
    ("meta-llama/Llama-3.1-8B", "RTX-4090", 16, 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-8B", "2xRTX-4090", 32, 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-8B", "H100-80GB", 64, 4096, {}),
    ("meta-llama/Llama-3.1-8B", "8xA100-40GB", 64, 4096, {}),
    ("meta-llama/Llama-3.1-8B", "8xH100-80GB", 64, 4096, {"allow": ("optimizer",)}),
    ("meta-llama/Llama-3.1-8B", "64xH100-80GB", 1024, 4096, {"stack": "torchtitan"}),
    ("meta-llama/Llama-3.1-8B", "64xH100-80GB", 64, 32768, {}),
    ("meta-llama/Llama-3.1-70B", "8xH100-80GB", 64, 4096, {"method": "lora"}),
    ("meta-llama/Llama-3.1-70B", "512xH100-80GB", 1024, 4096, {}),
    ("meta-llama/Llama-3.1-70B", "512xH100-80GB", 1024, 4096, {"stack": "megatron"}),
    ("mistralai/Mixtral-8x7B-v0.1", "64xH100-80GB", 512, 4096, {}),
)


def _said(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def files() -> Iterator[str]:
    """Return the table of the files that are written for the first choice of each question, by estimates."""
    lines, some = [], 0
    for name, gpus, batch, length, more in ASKED:
        plan = lab.plan(name, gpus, batch, fixed={"seq_len": length}, executor=NotSimulated("Not here."), **more)
        how = [f"{word} {_said(value)}" for word, value in more.items()]
        what = ", ".join([name.rpartition("/")[2], gpus, f"{batch} × {length:,}", *how])
        if plan.best is None:
            lines.append([what, "nothing fits", ""])
            continue
        with TemporaryDirectory() as folder:
            written = plan.best.write(f"{folder}/out")
        some += 1
        lines.append([what, program(lab.model(name), plan.best.run), ", ".join(written.files)])
    title = f"Files of the first choice: {some} of {len(ASKED)} questions"
    yield from titled_table(title, ["question", "what runs", "files"], lines, True)


QUESTIONS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "Llama 3.1 8B on 64 H100": ("meta-llama/Llama-3.1-8B", "64xH100-80GB", 1024, {}),
    "the same, optimizer, kernels and precision allowed": (
        "meta-llama/Llama-3.1-8B", "64xH100-80GB", 1024, {"allow": frozenset({"optimizer", "kernels", "precision"})}),
    "Llama 3.1 70B on 512 H100": ("meta-llama/Llama-3.1-70B", "512xH100-80GB", 2048, {}),
    "Mixtral 8x7B on 64 H100": ("mistralai/Mixtral-8x7B-v0.1", "64xH100-80GB", 512, {}),
    "Llama 3.1 8B, the cheapest of all cards, up to 8": (
        "meta-llama/Llama-3.1-8B", "8xH100-80GB", 64, {"goal": "cheapest"}),
}  # fmt: skip


def speed() -> Iterator[str]:
    """Return the table of how long searches take."""
    lines = []
    for what, (name, gpus, batch, asked) in QUESTIONS.items():
        question = Question(lab.model(name), batch, fixed={"seq_len": 4096}, **asked)
        where = machines(gpus)
        start = time.process_time()
        search = Search(question, list(priced(where)) if question.goal == "cheapest" else [where])
        taken = len(list(islice(search, SHOWN)))
        seconds = time.process_time() - start
        cut = sum(search.cuts.values()) + search.worse()
        many = search.tried + cut
        rate = seconds / many * CANDIDATES
        within = "met" if rate < SECONDS_BAR else "MISSED"
        lines.append([what, f"{many:,}", f"{search.tried:,}", f"{seconds:.1f} s", f"{rate:.1f} s", within])
        assert taken
    header = ["question", "candidates", "estimated", "CPU time", f"for {CANDIDATES:,}", f"< {SECONDS_BAR:g} s"]
    yield from titled_table("Search, in one process", header, lines)


def _decided(cases: Sequence[Case], packages: list[str]) -> dict[str, tuple[str, str]]:
    """Return by id what a plan says of steps, in two processes that look into folders of `packages` last."""
    with ProcessPoolExecutor(2, get_context("spawn"), _look_into, (packages,)) as pool:
        return {case.id: said for case, said in zip(cases, pool.map(decided, cases), strict=True)}


def _look_into(packages: list[str]) -> None:
    sys.path.extend(packages)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write plans.md there.")
@click.option("--estimates", is_flag=True, help="Do not simulate what estimates leave open.")
def main(out: Path | None, estimates: bool) -> None:
    """Ask a plan's two questions about published runs."""
    asked = cases()
    if estimates:
        said = [decided(case, simulate=False) for case in asked]
    else:
        of_stacks = [case for case in asked if stack_of(case.run).own_program]
        others = [case for case in asked if not stack_of(case.run).own_program]
        answers = {**_decided(of_stacks, [str(STACKS)]), **_decided(others, [])}
        said = [answers[case.id] for case in asked]
    found = list(zip(asked, said, strict=True))
    lines = [*choices(), *choices(told=False), *verdicts(found, not estimates), *margin(), *files(), *speed()]
    lines.append(provenance("llmlab", "torch", "transformers"))
    text = "\n".join(lines)
    print(text)
    if out:
        write(out / "plans.md", text)


if __name__ == "__main__":
    main()
