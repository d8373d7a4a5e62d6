"""The sums that the pages on 3D parallelism and experts do by hand agree with the estimates."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import H100, MODEL_70B, job
from llmlab.formulas.time import mesh
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.kernels import kernels
from llmlab.hardware.links import cluster

RUN, SPEC, NODES = job("16-three-d"), lab.model(MODEL_70B), cluster(H100)
F, NVLINK, NETWORK = efficiency(H100).matmul["bf16"], NODES.inside.reached, NODES.across.reached
T, L, H, WIDTH, V = RUN.tokens, SPEC.layers, SPEC.hidden, SPEC.intermediate, SPEC.vocab
KEYS = SPEC.kv_heads * SPEC.head_dim


def on_mesh(tp, pp, sequences=1024):
    dp = 512 // (tp * pp)
    return replace(RUN, tp=tp, pp=pp, dp=dp, accumulation=sequences // dp, sequence_parallel=tp > 1)


def seconds(tp, pp, sequences=1024):
    return step(MODEL_70B, on_mesh(tp, pp, sequences), H100, NODES).seconds


@pytest.mark.parametrize("degrees", [(2, 4), (2, 16), (4, 4), (4, 16), (8, 1)])
def test_the_memory_of_the_first_stage(degrees):
    tp, pp = degrees
    layer = 2 * H * H + 2 * H * KEYS + 3 * H * WIDTH
    n = (L / pp * layer + V * H * (2 if pp == 1 else 1)) / tp
    states = 4 * n + 12 * n * tp * pp / 512 + 2 * V * H * (1 - 1 / tp)
    divided = T * (14 * H + 2 * (H + 2 * KEYS) + 4 * SPEC.heads + 8 * WIDTH)
    by_hand = states + L * (divided / tp + 4 * T * H)
    estimated = lab.estimate(MODEL_70B, on_mesh(tp, pp), H100).peak_allocated
    assert by_hand == pytest.approx(estimated, rel=0.025) and by_hand < estimated


def test_activations_do_not_depend_on_the_stages():
    parts = [lab.estimate(MODEL_70B, on_mesh(4, pp), H100).parts["activations"] for pp in (2, 4, 8, 16)]
    assert max(parts) < 1.01 * min(parts)


def test_the_mesh_of_the_job_is_the_fastest_that_fits():
    best = mesh.search(MODEL_70B, H100, 512, 1024, seq_len=4096, precision="mixed-bf16")[0].run
    assert (best.tp, best.pp, best.zero, best.checkpointing) == (RUN.tp, RUN.pp, RUN.zero, RUN.checkpointing)


def test_messages_and_bubble_of_the_job():
    predicted, m = step(MODEL_70B, RUN, H100, NODES), RUN.accumulation
    halves = [kernels(lab.gpu(H100)).collective(kind, 2 * T * H, NODES.group(RUN.tp))
              for kind in ("all-gather", "reduce-scatter")]  # fmt: skip
    assert predicted.tensor == pytest.approx(4 * m * L / RUN.pp * sum(halves), rel=0.01)
    bubble = (RUN.pp - 1) / m * (predicted.compute + predicted.tensor)
    assert bubble * 0.93 < predicted.bubble < bubble


@pytest.mark.parametrize("sequences, breaks_even", [(256, 4), (1024, 2), (4096, 1)])
def test_doubling_tp_breaks_even_where_the_bound_says(sequences, breaks_even):
    bound = 3 / 4 / (2 * sequences / 512) * 4.5 * H * NVLINK / F
    assert bound == pytest.approx(breaks_even**2, rel=0.05)
    times = {tp: seconds(tp, 4, sequences) for tp in (1, 2, 4, 8)}
    assert times[2 * breaks_even] == pytest.approx(times[breaks_even], rel=0.02)
    assert all(times[2 * tp] < 0.97 * times[tp] for tp in (1, 2, 4) if tp < breaks_even)
    assert all(times[2 * tp] > 1.03 * times[tp] for tp in (1, 2, 4) if tp > breaks_even)


@pytest.mark.parametrize("ep, leaves, beta", [(8, 7 / 8, NVLINK), (64, 56 / 64, NETWORK)])
def test_the_all_to_alls_of_qwen(ep, leaves, beta):
    qwen = lab.model("Qwen/Qwen3-30B-A3B")
    run = lab.Training(ep=ep, dp=64, zero=1, seq_len=4096, precision="mixed-bf16")
    by_hand = 4 * qwen.moe_layers * 2 * qwen.experts_per_token * 4096 * qwen.hidden * leaves / beta
    predicted = step(qwen, run, H100, NODES).experts
    assert by_hand < predicted < 1.3 * by_hand
