"""Steps drawn at random, and the least room in which each one runs: the data behind lab.estimate's verdict.

    python -m benchmarks.memory.room_draws --last 2000  # adds the draws that room_draws.csv lacks; about 5 s each

Each draw has a number, which is its seed. Its options are drawn first. Then models, GPUs and sizes are drawn until the
estimated peak is between half of the GPU's memory and all of it, where a verdict is hard. The step is simulated, and
its requests are sent to allocators with less and less room (load_orders.py). The file lists models, GPUs and sizes,
which depend on the presets and formulas of the day, and the results in MiB; the options follow from the seed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import click

import llmlab as lab
from benchmarks.memory.load_orders import Requests, requests_of
from benchmarks.memory.past_releases import read_ahead
from llmlab.base.units import MiB
from llmlab.formulas.report import estimated
from llmlab.simulation.allocator.config import AllocatorConfig
from llmlab.specs.model import ModelSpec
from llmlab.specs.run import Inference, Run, Training
from llmlab.step.quantized import one_at_a_time

FILE = Path(__file__).with_suffix(".csv")
HEADER = ["number", "model", "gpu", "batch", "tokens", "new tokens or targets", "allocated", "reserved", "least room",
          "least room, expandable", "least room, loaded by threads"]  # fmt: skip
NEAR = 0.005  # the search ends when its bounds differ by this share of the room
EXPANDABLE = AllocatorConfig(expandable_segments=True)
GPUS = ("T4", "V100-32GB", "A10G", "RTX-3090", "A100-40GB", "A100-80GB", "H100-80GB")
LARGEST = 75e9  # parameters: the weights of larger presets do not fit any of these GPUs, not even in NF4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (("q_proj", "v_proj"), ATTENTION, (*ATTENTION, "gate_proj", "up_proj", "down_proj"))
TARGETS_OF = {"gpt2": (("c_attn",), ("c_attn", "c_proj")), "phi3": (("qkv_proj",), ("qkv_proj", "o_proj"))}
TRIES = 3000
SEVERAL = 10_000  # draws from this number on are on several GPUs
LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp": 8}, {"dp": 8, "zero": 1}, {"dp": 8, "zero": 2}, {"dp": 8, "zero": 3}, {"dp": 8, "zero": 3}, {"tp": 2},
    {"tp": 4}, {"tp": 8}, {"dp": 4, "tp": 2, "zero": 3}, {"dp": 8, "tp": 4, "zero": 3})  # fmt: skip
DENSE = ("llama", "mistral", "qwen2", "qwen3")  # families with tensor parallelism in lab.simulate


class Draw(NamedTuple):
    """A step that may or may not fit its GPU."""

    model: str
    gpu: str
    run: Run


class Room(NamedTuple):
    """The bytes that a step allocates and reserves with room for everything, and the least room in which it runs."""

    allocated: int
    reserved: int
    least: int


class Row(NamedTuple):
    """A draw with its results in bytes; `threads`: the least room after threads loaded the quantized weights."""

    number: int
    draw: Draw
    allocated: int
    reserved: int
    least: int
    expandable: int
    threads: int | None


def least_room(requests: Requests, order: list[tuple[int, bool]]) -> Room:
    """Return the room that a step takes with its weights loaded in `order`."""
    free = requests._replace(room=None).in_order(order)
    assert free is not None  # nothing is refused without a limit
    too_small, enough = free.allocated - 1, free.reserved
    while enough - too_small > NEAR * enough:
        room = (too_small + enough) // 2
        if requests._replace(room=room).in_order(order):
            enough = room
        else:
            too_small = room
    return Room(free.allocated, free.reserved, enough)


def drawn(number: int) -> Draw | None:
    """Return the draw of that number; None if of many sizes none brings its peak near a GPU's memory."""
    random = Random(f"room {number}")
    options, specs = _options(random, number), _specs()
    if number >= SEVERAL:
        specs = {name: [spec for spec in specs[name] if spec.parameters < 9e9] for name in DENSE}
    for _ in range(TRIES):
        spec = random.choice(specs[random.choice(list(specs))])
        card = random.choice(GPUS)
        try:
            run = _sized(random, spec, options)
            peak = estimated(spec, run, card).peak_allocated
        except lab.SpecError:
            continue
        if peak and 0.5 <= peak / lab.gpu(card).memory <= 1:
            return Draw(spec.name, card, run)
    return None


def rows() -> list[Row]:
    """Return the results of the file."""
    with FILE.open(encoding="utf-8", newline="") as lines:
        return [_row(cells) for cells in list(csv.reader(lines))[1:]]


def measured(number: int, draw: Draw) -> Row:
    """Simulate a draw, and return its results; raises as `lab.simulate` does."""
    requests = requests_of(draw.model, draw.run, draw.gpu)
    in_order = list(one_at_a_time(requests.sizes))
    room = least_room(requests, in_order)
    expandable = least_room(requests._replace(config=EXPANDABLE), in_order).least
    threads = least_room(requests, list(read_ahead(requests.sizes, seed=0))).least if requests.sizes else None
    return Row(number, draw, *room, expandable, threads)


def cells_of(row: Row) -> list[str]:
    """Return the cells of a row of the file."""
    name, card, run = row.draw
    last: int | str = ""
    if isinstance(run, Inference):
        batch, tokens, last = run.batch, run.prompt_len, run.new_tokens
    else:
        batch, tokens = run.micro_batch, run.seq_len
        if run.lora:
            last = _targets(lab.model(name)).index(run.lora.targets)
    sizes = [row.allocated, row.reserved, row.least, row.expandable, row.threads]
    in_mib = [f"{size / MiB:.0f}" if size else "" for size in sizes]
    return [str(row.number), name.rpartition("/")[2], card, str(batch), str(tokens), str(last), *in_mib]


def _row(cells: list[str]) -> Row:
    number, name, card, batch, tokens, last, *sizes = cells
    spec, options = lab.model(name), _options(Random(f"room {number}"), int(number))
    run = _run(options, int(batch), int(tokens), int(last or 0), _targets(spec))
    allocated, reserved, least, expandable, threads = [int(size or 0) * MiB for size in sizes]
    return Row(int(number), Draw(spec.name, card, run), allocated, reserved, least, expandable, threads or None)


@cache
def _specs() -> dict[str, list[ModelSpec]]:
    """Return the presets with formulas by family; a family with few of them is drawn as often as one with many."""
    by_family: dict[str, list[ModelSpec]] = {}
    for name in lab.models():
        spec = lab.model(name)
        if spec.has_formulas and spec.parameters <= LARGEST:
            by_family.setdefault(spec.family, []).append(spec)
    return by_family


def _targets(spec: ModelSpec) -> tuple[tuple[str, ...], ...]:
    return TARGETS_OF.get(spec.family, TARGETS)


def _options(random: Random, number: int) -> dict[str, Any]:
    """Return the fields of a Training or an Inference that are no sizes, with the rank of adapters in place of them."""
    if number >= SEVERAL:
        return _on_several(random)
    if random.random() < 0.08:
        weights, attention = random.choice(("fp32", "fp16", "bf16")), random.choice(("sdpa", "eager"))
        return {"weights": weights, "kv": weights, "attention": attention}
    options: dict[str, Any] = {
        "precision": random.choice(("fp32", "fp16", "bf16", "autocast-fp16", "autocast-bf16", "mixed-bf16")),
        "optimizer": random.choice(("adamw", "adamw", "adamw-fused", "adamw-8bit", "sgd", "adafactor", "lion")),
        "checkpointing": random.choice((None, None, "selective", "full", "full")),
        "attention": random.choice(("sdpa", "sdpa", "eager", "flash", "efficient")),
        "accumulation": random.choice((1, 1, 2)),
        "kernels": random.choice((*(None,) * 8, "fused-loss", "fused-norm")),
    }
    if random.random() < 0.4:
        options |= {"rank": random.choice((8, 16, 64)), "quantization": random.choice((None, "nf4", "nf4", "int8"))}
    return options


def _on_several(random: Random) -> dict[str, Any]:
    """Return the fields of a Training on several GPUs that are no sizes."""
    layout = random.choice(LAYOUTS)
    options: dict[str, Any] = {
        **layout,
        "precision": random.choice(("bf16", "autocast-bf16", "mixed-bf16")),
        "optimizer": random.choice(("adamw", "adamw-fused", "sgd")),
        "checkpointing": random.choice((None, "selective", "full")),
        "attention": random.choice(("sdpa", "flash", "efficient")),
        "accumulation": random.choice((1, 2)),
        "kernels": random.choice((None, None, "fused-loss")),
    }
    if "tp" in layout:
        options["sequence_parallel"] = random.choice((False, True))
    elif random.random() < 0.2:
        options["rank"] = 16
    return options


def _sized(random: Random, spec: ModelSpec, options: dict[str, Any]) -> Run:
    """Return a run with these options and sizes of its own, powers of two or any."""
    powers = random.random() < 0.5
    length = 2 ** random.randint(7, 13) if powers else round(2 ** random.uniform(7, 13))
    batch = 2 ** random.randint(0, 6) if powers else round(2 ** random.uniform(0, 6))
    last = 0
    if "weights" in options:
        last = random.choice((16, 64))
    elif "rank" in options:
        last = random.randrange(len(_targets(spec)))
    return _run(options, batch, length, last, _targets(spec))


def _run(options: dict[str, Any], batch: int, length: int, last: int, targets: tuple[tuple[str, ...], ...]) -> Run:
    """Return the run of these options and sizes; `last` is how many tokens are generated, or which of `targets`."""
    if "weights" in options:
        return Inference(batch, length, last, **options)
    rest = dict(options)
    if rank := rest.pop("rank", None):
        rest["lora"] = lab.LoRA(rank=rank, targets=targets[last])
    return Training(batch, length, **rest)


def missing(first: int, last: int) -> Iterator[tuple[int, Draw]]:
    """Yield the draws from `first` to below `last` that the file lacks."""
    known = {row.number for row in rows()} if FILE.exists() else set()
    for number in range(first, last):
        if number not in known and (draw := drawn(number)):
            yield number, draw


@click.command(help="Simulate draws, and add the least room in which each of them runs to room_draws.csv.")
@click.option("--first", type=int, default=0, show_default=True, help="Add missing draws from this number on.")
@click.option("--last", type=int, default=2000, show_default=True, help="Add missing draws with smaller numbers.")
def main(first: int, last: int) -> None:
    if not FILE.exists():
        FILE.write_text(",".join(f'"{name}"' if "," in name else name for name in HEADER) + "\n", encoding="utf-8")
    for number, draw in missing(first, last):
        try:
            row = measured(number, draw)
        except (lab.NotAvailable, lab.SpecError) as error:
            print(f"{number}: {error}")
            continue
        with FILE.open("a", encoding="utf-8", newline="") as lines:
            csv.writer(lines, lineterminator="\n").writerow(cells_of(row))


if __name__ == "__main__":
    main()
