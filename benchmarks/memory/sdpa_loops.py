"""Loops of transformers' own pages, in the simulator, with the release of transformers that they were measured with.

    python -m benchmarks.memory.sdpa_loops                           # prints
    python -m benchmarks.memory.sdpa_loops --out benchmarks/results  # and writes sdpa_loops.md, which the book includes

Each release is installed into a folder of its own (by pip, without its dependencies: a download) and put before the
installed one in a process of its own. The rows are in sdpa_loops.toml.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from benchmarks.provenance import provenance, titled_table, write

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).resolve()
ROWS = HERE.with_suffix(".toml")
WARM_UP, STEPS = 2, 2  # all steps after the first take the same
OOM = "OOM"
HEADER = ["attention", "batch × tokens", "published", "simulated", "error"]


class Row(NamedTuple):
    """A published peak in MB (10^6 bytes), or OOM, and what the simulator says."""

    group: str
    shape: str
    way: str
    published: float | str
    simulated: float | str

    @property
    def error(self) -> float | None:
        if isinstance(self.published, str) or isinstance(self.simulated, str):
            return None
        return self.simulated / self.published - 1


def groups() -> dict[str, dict[str, Any]]:
    """Return the groups of rows by name."""
    return tomllib.loads(ROWS.read_text(encoding="utf-8"))


def asked(group: dict[str, Any]) -> Iterator[tuple[int, int, str, float | str]]:
    """Yield batch, tokens, attention and the published peak of each row of a group."""
    left_out = [tuple(each) for each in group.get("left_out", ())]
    for batch, tokens, *published in group["peaks"]:
        for way, peak in zip(("eager", "sdpa"), published, strict=True):
            if way in group.get("ways", (way,)) and (batch, tokens, way) not in left_out:
                yield batch, tokens, way, peak


def simulate(group: dict[str, Any]) -> list[float | str]:
    """Return the peak of each row in MB, by the transformers that this process imports."""
    import torch
    import transformers

    import llmlab as lab

    card = lab.gpu(group["gpu"])
    if mib := group.get("memory_mib"):
        card = replace(card, memory=mib << 20)
    kind = dict(group["config"])
    config = transformers.AutoConfig.for_model(kind.pop("model_type"), **kind)
    owner = getattr(transformers, group["class"])
    found: list[float | str] = []
    for batch, tokens, way, _ in asked(group):
        with lab.simulator(card):
            try:
                model = owner.from_config(config, attn_implementation=way, torch_dtype=torch.float16).to("cuda")
                model.train()
                ids = torch.randint(config.vocab_size, (batch, tokens), device="cuda")
                for step in range(WARM_UP + STEPS):
                    if step == WARM_UP:
                        torch.cuda.reset_peak_memory_stats()
                    model.zero_grad()
                    outputs = model(input_ids=ids)
                    loss = outputs.logits.sum()
                    loss.backward()
                found.append(torch.cuda.max_memory_allocated() * 1e-6)
            except torch.cuda.OutOfMemoryError:
                found.append(OOM)
    return found


def install(releases: dict[str, str], folder: Path) -> Path:
    """Install these releases, without what they depend on, into a folder named by them, if it is not there."""
    place = folder / "-".join(releases.values())
    if not place.exists():
        wanted = [f"{name}=={version}" for name, version in releases.items()]
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *wanted]
        subprocess.run(command, check=True)
    return place


def rows(folder: Path) -> list[Row]:
    """Return all rows, each group simulated by a process with its releases."""
    found = []
    for name, group in groups().items():
        first = [str(install(group["releases"], folder)), str(HERE.parents[2])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(first)}
        command = [sys.executable, "-m", "benchmarks.memory.sdpa_loops", "--group", name]
        said = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
        for (batch, tokens, way, peak), size in zip(asked(group), json.loads(said.splitlines()[-1]), strict=True):
            found.append(Row(name, f"{batch} × {tokens}", way, peak, size))
    return found


def shown(size: float | str) -> str:
    return size if isinstance(size, str) else f"{size:,.1f} MB"


def to_markdown(found: list[Row], made: str) -> str:
    """Return a table for each model, and how far off the rows are."""
    text = []
    for name, group in groups().items():
        mine = [row for row in found if row.group == name]
        body = [[row.way, row.shape, shown(row.published), shown(row.simulated),
                 "–" if (e := row.error) is None else f"{e:+.2%}"] for row in mine]  # fmt: skip
        text += titled_table(f"{group['model']} with transformers {group['releases']['transformers']}", HEADER, body)
    errors = [row.error for row in found if row.error is not None]
    within = sum(abs(error) <= 0.02 for error in errors)
    refused = [row for row in found if row.published == OOM]
    right = sum(row.simulated == OOM for row in refused)
    said = [
        f"{len(errors)} rows: median |error| {median(map(abs, errors)):.2%}, worst {max(errors, key=abs):+.1%}, "
        f"{within} within 2%. {right} of the {len(refused)} runs that ran out of memory also do so in the simulation.",
        *dict.fromkeys(f"{group['source']}." for group in groups().values()),
        *(f"{group['model']}: {group['doubt']}." for group in groups().values() if "doubt" in group),
    ]
    return "\n".join([*text, *(f"- {note}" for note in said), "", made])


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write sdpa_loops.md here.")
@click.option("--releases", type=click.Path(file_okay=False, path_type=Path), help="Keep installed releases here.")
@click.option("--group", hidden=True, help="Simulate one group with the transformers that is imported.")
def main(out: Path | None, releases: Path | None, group: str | None) -> None:
    """Simulate the loops of transformers' pages with the releases they were measured with."""
    if group:
        print(json.dumps(simulate(groups()[group])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        text = to_markdown(rows(releases or Path(temporary)), provenance("llmlab", "torch"))
    print(text)
    if out:
        write(out / "sdpa_loops.md", text)


if __name__ == "__main__":
    main()
