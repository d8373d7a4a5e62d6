"""Two published tables of memory: their authors' own commands under `llmlab run`, once for each row.

    python -m benchmarks.scripts.published_runs --clones DIR --work DIR --out benchmarks/results  # published_runs.md

DIR of --clones holds DaoyuanLi2816/can-i-finetune-this at commit 053ce9e, and as litgpt-2024-09 Lightning-AI/litgpt at
00af8b0d, the commit of its table's last rows. The figures are read from there, and no line of either is changed.

`canifinetune bench` trains Qwen2.5 on an RTX 4080 with synthetic batches of a fixed length. Its result files have the
largest allocated and reserved memory.

litgpt fine-tunes with each file of config_hub/finetune on an A10G, and config_hub/finetune/README.md has the allocated
memory, in units of 10^9 bytes. Its rows are those of Alpaca, cut after 512 tokens. The longest batch decides, and the
log of such a run in tutorials/0_to_litgpt.md says that the longest row has 512 tokens, so each stand-in has as many.
Only the number of accumulated batches is another here: two instead of up to 64, which need the same memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml

from benchmarks.provenance import provenance, titled_table, write
from benchmarks.scripts.scripts import ANSWERED, NO_ROOM, Case, Result, run_case
from benchmarks.scripts.standins import litgpt_checkpoint
from llmlab.base.units import GiB

BENCH, LITGPT = "can-i-finetune-this", "litgpt-2024-09"
OOM = "OOM"
LIMIT = 900  # seconds for one row
Row = tuple[Case, dict[str, float]]  # with the published bytes, of "allocated" and "reserved"; none if out of memory


def bench_rows(clones: Path) -> Iterator[Row]:
    """Yield the runs of canifinetune's benchmarks/results."""
    for file in sorted((clones / BENCH / "benchmarks/results").glob("*.json")):
        result = json.loads(file.read_text())
        config, measured = result["config"], result["measured"]
        words = [f"--{name} {config[field]}" for name, field in (
            ("model", "model_id"), ("method", "method"), ("seq-len", "seq_len"), ("steps", "steps"),
            ("micro-batch-size", "micro_batch_size"), ("lora-rank", "lora_rank"),
        )]  # fmt: skip
        words += [] if config["gradient_checkpointing"] else ["--no-gradient-checkpointing"]
        case = Case(name=file.stem, place=BENCH, run=f"-m canifinetune.cli bench {' '.join(words)}", gpu="RTX-4080",
                    path=f"{BENCH}/src", steps=config["steps"], limit=LIMIT)  # fmt: skip
        yield case, {kind: measured[f"peak_{kind}_gb"] * GiB for kind in ("allocated", "reserved")}


def litgpt_rows(clones: Path) -> Iterator[Row]:
    """Yield the rows of litgpt's table. A file that was run on two machines, on one GPU of each, is one row."""
    folder = clones / LITGPT / "config_hub/finetune"
    files = {str(file.relative_to(folder)).lower(): file for file in folder.glob("*/*.yaml")}
    lines = re.findall(r"^\|\s*(\S+\.yaml)\s*\|(.*)$", (folder / "README.md").read_text(), re.MULTILINE)
    rows = {name.replace("gemma2b/", "gemma2-2b/"): cells.split("|") for name, cells in lines}
    for name, cells in rows.items():
        file, peak = files[name.lower()], cells[7].strip()
        config = yaml.safe_load(file.read_text())
        verb = "finetune_full" if file.stem == "full" else "finetune_lora"
        batch = 2 * config["train"]["micro_batch_size"] * config["devices"]
        checkpoint = Path(config["checkpoint_dir"]).name
        run = (f"-m litgpt {verb} --config config_hub/finetune/{file.relative_to(folder)} "
               f"{{data}}/{LITGPT}/{checkpoint} --train.global_batch_size {batch}")  # fmt: skip
        case = Case(name=name.removesuffix(".yaml").replace("/", "-"), place=LITGPT, run=run, gpu="A10G", path=LITGPT,
                    limit=LIMIT, data={"mhenrichsen/alpaca_2k_test": "alpaca_long.jsonl"})  # fmt: skip
        yield case, {} if peak == OOM else {"allocated": float(peak.removesuffix(" GB")) * 1e9}


def report(
    title: str, total: int, rows: list[tuple[Row, Result]], unit: tuple[str, float], kinds: tuple[str, ...]
) -> list[str]:
    """Return the summary and the tables of one source, of whose `total` rows those in `rows` were run. Its memory is
    shown in its own unit, by name and bytes."""
    lines, off = [], {kind: list[float]() for kind in kinds}
    same = failed = 0
    for (case, published), made in rows:
        if made.outcome not in ANSWERED:
            failed += 1
            continue
        same += (made.outcome == NO_ROOM) == (not published)
        cells = []
        for kind in kinds:
            if not published or made.outcome == NO_ROOM:
                cells += [_size(published.get(kind), unit[1]), NO_ROOM if made.outcome == NO_ROOM else "fits", ""]
                continue
            size = getattr(made, f"peak_{kind}")
            off[kind].append(size / published[kind] - 1)
            cells += [_size(published[kind], unit[1]), _size(size, unit[1]), f"{off[kind][-1]:+.1%}"]
        lines.append([case.name, *cells])
    apart = " and ".join(
        f"{kind} memory is off by {median(map(abs, each)):.1%} at the median and by {max(map(abs, each)):.1%} at most"
        for kind, each in off.items() if each
    )
    text = [f"{title}: we ran {len(rows)} of {total} rows. Of these, {len(rows) - failed} can be simulated, and {same} "
            f"have the published outcome. The {apart}.", ""]  # fmt: skip
    header = [cell for kind in kinds for cell in (f"{kind}, published, {unit[0]}", f"simulated, {unit[0]}", "off")]
    text += titled_table(title, ["row", *header], lines)
    if failed:
        messages = [[case.name, made.said[:200]] for (case, _), made in rows if made.outcome not in ANSWERED]
        text += titled_table(f"{title}: not simulated", ["row", "message"], messages, words=True)
    return text


def _size(size: float | None, unit: float) -> str:
    return NO_ROOM if size is None else f"{size / unit:.2f}"


@click.command(help=__doc__.split("\n")[0])
@click.option("--clones", envvar="CLONES", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--work", envvar="WORK", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False))
@click.argument("names", nargs=-1)
def main(clones: Path, work: Path, out: Path | None, names: tuple[str, ...]) -> None:
    """Run the rows that are not in --work yet, or NAMES, and write the tables."""
    clones, work = clones.resolve(), work.resolve()
    (work / "logs").mkdir(exist_ok=True)
    sys.path.insert(0, str(clones / LITGPT))  # the configs of its checkpoints are its own
    for file in (clones / LITGPT / "config_hub/finetune").glob("*/*.yaml"):
        checkpoint = work / "data" / LITGPT / Path(yaml.safe_load(file.read_text())["checkpoint_dir"]).name
        if not checkpoint.exists():
            litgpt_checkpoint(checkpoint, work / "tokenizer")
    kept = work / "published_runs.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    sources = {BENCH: list(bench_rows(clones)), LITGPT: list(litgpt_rows(clones))}
    for case, published in [row for rows in sources.values() for row in rows]:
        if case.name in names or (not names and case.name not in done):
            made = run_case(case, clones, work)
            done[case.name] = asdict(made)
            kept.write_text(json.dumps(done, indent=1))
            print(case.name, published, made, flush=True)
    shown = {source: [(row, Result(**done[row[0].name])) for row in rows if row[0].name in done]
             for source, rows in sources.items()}  # fmt: skip
    tables = {BENCH: ("canifinetune's runs on an RTX 4080", ("GiB", GiB), ("allocated", "reserved")),
              LITGPT: ("LitGPT's configurations on an A10G", ("GB", 1e9), ("allocated",))}  # fmt: skip
    text = [*(line for source, (title, *how) in tables.items()
              for line in report(title, len(sources[source]), shown[source], *how)),
            provenance("llmlab", "torch", "transformers", "peft", "bitsandbytes", "lightning")]  # fmt: skip
    print("\n".join(text))
    if out:
        write(out / "published_runs.md", "\n".join(text))


if __name__ == "__main__":
    main()
