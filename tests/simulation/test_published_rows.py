"""Memory that others read on other GPUs and published, against their scripts in the simulator."""


import pytest
import torch

import llmlab as lab
from benchmarks.memory import published

MiB = 1 << 20
ROWS = {f"{row.figure}: {row.label}": row for row in published.rows()}


def of(figure: str, *labels: str) -> list:
    return [ROWS[f"{figure}: {label}"] for label in labels]


@pytest.mark.parametrize("row", of("mingpt-memory", "gpt-nano", "gpt-nano, early"), ids=lambda row: row.label)
def test_a_whole_training_loop_takes_to_the_byte_what_was_read_with_the_workspaces_of_its_time(row):
    assert published.simulated(row) == row.measured
    kept = published.simulated(row._replace(older=False)) - row.measured
    assert 0 < kept <= MiB  # what a handle keeps today lies there at the peak too


@pytest.mark.parametrize("row", of("litgpt-lora-memory", "phi-1.5, 1", "Llama 2 7B, 1"), ids=lambda row: row.label)
def test_lora_fine_tuning_takes_what_was_read_on_an_a100(row):
    assert published.simulated(row) == pytest.approx(row.measured, rel=5e-4)  # published to three or four digits


@pytest.mark.parametrize(
    "row", of("llms-from-scratch-memory", "as in the book", "PyTorch's attention"), ids=lambda row: row.label
)
def test_reserved_bytes_of_a_gpt_come_out_to_the_last_published_digit(row):
    assert published.simulated(row) / 2**30 == pytest.approx(row.measured / 2**30, abs=5.1e-5)


# ---- what those rows taught


@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_layer_made_on_the_host_is_quantized_where_it_moves_and_gives_gradients(double):
    bnb = pytest.importorskip("bitsandbytes")
    with lab.simulator("A100-80GB") as card:
        layer = bnb.nn.Linear4bit(1024, 1024, bias=False, compute_dtype=torch.bfloat16, compress_statistics=double)
        layer = layer.to("cuda")
        assert layer.weight.device.type == "cuda" and card.allocated < 1024 * 1024 // 2 + 100_000
        x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
