"""Predict the published training throughputs of mixtures of experts, and say how far off that is.

    python -m benchmarks.time.mixtures                           # prints the table
    python -m benchmarks.time.mixtures --out benchmarks/results  # and writes mixtures.md

The rows are those of mixtures.toml, which says where they are from. A hash of their ids divides each group into two
halves. The first was looked at while the formulas were written, and the second was predicted once, after that, as were
the rows of older recipes. No constant is fitted to any of them.

The last line has the errors if experts take three times as long as the fastest forward kernel of a serving engine
(llmlab/hardware/engine_kernels). These kernels were measured with at most 16,384 tokens on all ranks together, and
they include sorting, and experts that are loaded unequally. More tokens take proportionally longer.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import click

import llmlab as lab
from benchmarks.provenance import provenance, titled_table, write
from benchmarks.time.throughput import Pairs, Predicted, errors, predict
from benchmarks.time.throughput_rows import Row, read
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import product_seconds
from llmlab.serving.kernels import engine_kernels

ROWS = Path(__file__).with_name("mixtures.toml")


def parts(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows by title: each group in two halves, in the order of a hash of their ids. The rows of older
    recipes are one group, of which no row was looked at."""
    titled = {}
    for group in dict.fromkeys(row.group for row in rows):
        mine = [row for row in rows if row.group == group]
        ordered = sorted(mine, key=lambda row: sha256(row.id.encode()).hexdigest())
        middle = 0 if group == "Older recipes" else -(-len(ordered) // 2)
        titled |= {f"{group}, first half": ordered[:middle]} if middle else {}
        titled[f"{group}, {'second half, ' if middle else ''}kept back"] = ordered[middle:]
    return titled


def served(row: Row, it: Predicted) -> Predicted:
    """Return the prediction with the times of serving engines for experts."""
    spec, gpu, run = lab.model(row.model), lab.gpu(row.card), row.run
    products = product_seconds(spec, run, kernels(gpu))
    assert products and it.rate
    shape = spec.hidden, spec.moe_intermediate, spec.experts_per_token, spec.experts, 1, run.ep
    tokens = run.tokens // run.tp * run.ep  # of the ranks that share a layer's experts
    forward = min(engine_kernels(gpu).routed_experts(name, "fp8", shape, tokens) for name in ("vllm", "trtllm"))
    more = 3 * forward * run.accumulation * spec.moe_layers / run.pp - products["experts"]
    tokens_of_gpu = run.global_batch * run.seq_len / run.world_size
    return Predicted(tokens_of_gpu / (tokens_of_gpu / it.rate + more))


def shown(predictions: Pairs) -> list[list[str]]:
    """Return a line of the table for each row."""
    lines = []
    for row, it in predictions:
        run, error = row.run, f"{it.rate / row.measured - 1:+.1%}" if it.rate else it.why
        inside = "yes" if it.low and it.high and it.low <= row.measured <= it.high else "no"
        degrees = " ".join(f"{axis}{getattr(run, axis)}" for axis in ("tp", "pp", "ep") if getattr(run, axis) > 1)
        graphs = {None: "", "full_iteration": ", one graph", "transformer_engine": ", graphs of modules"}
        degrees += graphs[run.stack.cuda_graph_impl]
        lines.append([f"{row.label}, {run.world_size} × {row.card}", f"{degrees}, {run.micro_batch} × {run.seq_len:,}",
                      row.citation.rpartition("container ")[2].partition(",")[0], f"{row.measured:,.0f}",
                      f"{it.rate or 0:,.0f}", error, inside])  # fmt: skip
    return lines


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for mixtures.md.")
def main(out: Path | None) -> None:
    """Predict all rows."""
    header = ["run", "parallelism, micro-batch", "container", "published tokens/s per GPU", "predicted", "error",
              "within the 80 % interval"]  # fmt: skip
    text, others, kept_back = [], [], []
    for name, rows in parts(read(ROWS)).items():
        predictions: Pairs = [(row, predict(row)) for row in rows]
        text += titled_table(f"{name}: {errors(predictions)}", header, shown(predictions))
        kept_back += predictions if name.endswith("kept back") else []
        others += [(row, served(row, it)) for row, it in predictions if row.model == "Qwen/" + row.label]
    for label in sorted({row.label for row, _ in kept_back}):
        text += [f"{label}, kept back: {errors([pair for pair in kept_back if pair[0].label == label])}", ""]
    text += [f"Qwen3's rows with the expert kernels of serving engines: {errors(others)}", ""]
    whole = "\n".join([*text, provenance("llmlab")])
    print(whole)
    if out:
        write(out / "mixtures.md", whole)


if __name__ == "__main__":
    main()
