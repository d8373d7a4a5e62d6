"""Memory that others read on other GPUs and published, against their scripts in the simulator."""


import pytest
import torch
from torch import nn

import llmlab as lab
from benchmarks.memory import published

MiB = 1 << 20
ROWS = {f"{row.figure}: {row.label}": row for row in published.rows()}


def of(figure: str, *labels: str) -> list:
    return [ROWS[f"{figure}: {label}"] for label in labels]


@pytest.mark.parametrize(
    "row",
    of(
        "liger-operators-memory",
        "group_norm, A100-40GB, C 32",
        "group_norm, B200, C 2048",
        "rms_norm of torch, H100-80GB, H 1024",
        "kl_div, H100-80GB-PCIe, V 4096",
        "tvd, H100-80GB, V 8192",
        "jsd, H100-80GB-PCIe, V 4096",
    ),
    ids=lambda row: row.label,
)
def test_single_operators_take_to_the_byte_what_was_read_on_other_cards(row):
    assert published.simulated(row) == row.measured


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_write_out_an_input_that_is_not_contiguous(dtype):
    with lab.simulator("A100-80GB") as card:
        norm = nn.LayerNorm(256).cuda().to(dtype)
        x = torch.randn(256, 512, device="cuda", dtype=dtype).t()
        held = card.allocated
        y = norm(x)
        statistics = 2 * 512 * 4
        assert card.peak_allocated - held == 2 * x.numel() * x.element_size() + statistics
        assert card.allocated - held == y.numel() * y.element_size() + statistics


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_write_out_a_gradient_that_is_one_number(norm):
    def peak(spread: bool) -> int:
        with lab.simulator("A100-80GB") as card:
            y = norm(1024).cuda()(torch.randn(64, 1024, device="cuda", requires_grad=True))
            gradient = torch.ones(1, 1, device="cuda").expand(64, 1024) if spread else torch.ones_like(y)
            held = card.allocated
            card.reset_peak()
            y.backward(gradient)
            return card.peak_allocated - held

    assert peak(spread=True) - peak(spread=False) == 64 * 1024 * 4


def test_group_norms_backward_has_sums_and_factors_of_each_channel():
    N, C, groups = 8, 64, 16
    with lab.simulator("A100-80GB") as card:
        norm = nn.GroupNorm(groups, C).cuda()
        y = norm(torch.randn(N, C, 128, device="cuda", requires_grad=True))
        gradient = torch.ones_like(y)
        held = card.allocated
        card.reset_peak()
        y.backward(gradient)
        gradients = N * C * 128 * 4 + 2 * 512
        assert card.peak_allocated - held == gradients + 3 * 4 * N * C + 2 * 4 * N * groups


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
