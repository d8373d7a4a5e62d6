"""What the chapter on precision derives by hand agrees with the estimate and with the simulation of the running job."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.archive.store import PACKAGE
from llmlab.course.job import GPU, MODEL, job

B, S, h, f, V, L, a = 4, 1024, 2048, 8192, 128256, 16, 32
T, N = B * S, lab.model(MODEL).parameters
FP32, AUTOCAST = job("02-memory-anatomy"), job("04-precision")


def change(**options):
    """Return the bytes by which autocast raises the peak."""
    fp32, half = (lab.estimate(MODEL, replace(run, **options), GPU).peak_allocated for run in (FP32, AUTOCAST))
    return half - fp32


def by_hand(S, T):
    return 2 * N - T * (L * (8 * f + 6 * h - 2 * a * S) + 2 * V)


@pytest.mark.parametrize("sequences", [2, 4, 5, 6, 8])
def test_autocast_changes_the_peak_by_the_copies_less_the_activations(sequences):
    # What is left out is small: a cast of the last norm's output, and a buffer of the loss.
    assert change(micro_batch=sequences) == pytest.approx(by_hand(S, sequences * S), abs=0.011 * 2**30 * sequences)


def test_autocast_breaks_even_where_the_formula_says():
    assert change(micro_batch=5) > 0 > change(micro_batch=6)  # 5,455 tokens
    assert change(seq_len=512) > 0 > change(seq_len=512, micro_batch=5)  # 2,529 tokens
    long = [change(seq_len=2048, micro_batch=sequences) for sequences in (1, 2, 4)]  # never
    assert long == sorted(long)
    assert long[0] > 0


def test_only_matmuls_become_faster():
    fp32, half = (lab.estimate(MODEL, run, GPU).time for run in (FP32, AUTOCAST))
    matmuls = [time["products"] + time["attention"] for time in (fp32, half)]
    flop = 6 * N * T + 12 * L * B * S**2 * h
    assert matmuls[0] / matmuls[1] == pytest.approx(4.6, abs=0.05)
    assert matmuls[0] == pytest.approx(flop / 4.26e12, rel=0.01)
    assert half["elementwise"] > fp32["elementwise"]
    assert half["optimizer"] == fp32["optimizer"]


def test_a_measured_step_with_fp16_weights_is_no_slower_than_with_bf16():
    def seconds(precision, **options):
        run = lab.Training(precision=precision, **options)
        return lab.records(MODEL, run, "H200", source="measured", folder=PACKAGE)[0].step_seconds

    assert seconds("fp16", checkpointing="full") < 1.05 * seconds("bf16", checkpointing="full")
    both = {"micro_batch": 4, "seq_len": 2048}
    assert 1.1 < seconds("autocast-bf16", **both) / seconds("bf16", **both) < 1.2


def test_fp16_weights_under_autocast_to_bf16_need_copies_and_an_fp32_residual_stream():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = 2
    config = AutoConfig.for_model(**lab.model(MODEL).config | {"num_hidden_layers": layers})

    def peak(dtype):
        with lab.simulator("RTX-4090"):
            with torch.device("cuda"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            parameters = sum(weight.numel() for weight in model.parameters())
            ids = torch.randint(V, (B, S), device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return torch.cuda.max_memory_allocated(), parameters

    (bf16, parameters), (fp16, _) = peak(torch.bfloat16), peak(torch.float16)
    assert fp16 - bf16 == pytest.approx(2 * parameters + 10 * h * layers * T, rel=0.03)


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_with_fp16_weights_breaks_in_its_first_step_or_forgets_the_second_moment_if_fused(fused):
    import torch

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, fused=fused)
    for step in range(20):
        weight.grad = torch.tensor([1e-4, 1e-5], dtype=torch.float16)
        optimizer.step()
        assert weight.isfinite().all() == fused
        assert not optimizer.state[weight]["exp_avg_sq"].any(), step
    if fused:  # equal gradients move a weight by about the learning rate, if the average of their squares grows
        assert (1 - weight > 2 * 20 * 1e-3).all()
