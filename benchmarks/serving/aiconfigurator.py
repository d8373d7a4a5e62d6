"""What NVIDIA's aiconfigurator predicts for rows of serving.csv; serving.py shows it beside what lab.serve predicts.

    pip install aiconfigurator==0.12.0
    python -m benchmarks.serving.aiconfigurator --every 8    # -> aiconfigurator.csv; 5 minutes

Its `cli_estimate` gets a row's engine, model, GPU, degrees, lengths and users per copy of attention, and the precision
of its weights; where it has no kernels for that, the precision that it reads from the model's config. It gets no
version, since it has kernels of few. The options in launched.csv have no counterpart there.
"""

from __future__ import annotations

import contextlib
import csv
import io
from functools import cache

import click

from benchmarks.serving.serving import BESIDE, FILE, FITTED, fitted, numbered, service_of

# Names under which the package has the models' configs, so that it need not download them.
NAMES = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "zhipuai/GLM-5": "zai-org/GLM-5",
         "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B"}  # fmt: skip


def estimate(row: dict[str, str]) -> tuple[float, float] | str:
    """Return the milliseconds to the first and per further token; or why there are none."""
    from aiconfigurator.cli.api import cli_estimate

    service = service_of(row)
    assert service is not None  # main left the others out
    copies = service.dp_attention
    about = {
        "model_path": NAMES.get(row["model"], row["model"]),
        "system_name": row["gpu"].lower() + ("" if row["gpu"] == "GB200" else "_sxm"),
        "backend_name": row["engine"], "isl": service.prompt_len, "osl": service.output_len,
        "batch_size": max(1, (service.concurrency or 1) // copies), "tp_size": service.tp // copies,
        "attention_dp_size": copies, "moe_tp_size": service.tp // service.ep, "moe_ep_size": service.ep,
    }  # fmt: skip
    weights = row["weights"] or None
    why = ""
    for precision in dict.fromkeys([(weights, weights), (weights, None), (None, None)]):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = cli_estimate(**about, gemm_quant_mode=precision[0], moe_quant_mode=precision[1])
            return found.ttft, found.tpot
        except Exception as error:  # whatever a row meets there is its answer
            why = f"{type(error).__name__}: {error}"
    return why


@click.command()
@click.option("--every", default=8, help="Ask for every n-th of the reported rows.")
def main(every: int) -> None:
    """Write aiconfigurator.csv."""
    from aiconfigurator_core.sdk import perf_database

    # It reads 150 files at each call to see which versions it has.
    perf_database.get_supported_databases = cache(perf_database.get_supported_databases)
    with FILE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == "InferenceX"]
    with BESIDE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "ttft_ms", "tpot_ms"])
        for row in sorted(rows, key=numbered):
            if fitted(row) or (numbered(row) // FITTED) % every or service_of(row) is None:
                continue
            found = estimate(row)
            if isinstance(found, str):
                click.echo(f"{row['id']}: {found}", err=True)
            else:
                writer.writerow([row["id"], f"{found[0]:.2f}", f"{found[1]:.3f}"])
                file.flush()


if __name__ == "__main__":
    main()
