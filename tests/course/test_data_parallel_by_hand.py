"""The sums that the chapter on data parallelism does by hand agree with the estimate."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import H100, MODEL, MODEL_8B, job
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.kernels import training_rates
from llmlab.hardware.links import base_seconds, cluster, link

RUN, SPEC = job("11-data-parallel"), lab.model(MODEL_8B)
N, EDGES = SPEC.parameters, 2 * SPEC.vocab * SPEC.hidden  # elements of the embedding and the head
FAST, SHARED = cluster(H100, "InfiniBand-NDR"), cluster(H100, "InfiniBand-NDR", adapters=1)
SMALL = lab.Training(micro_batch=4, seq_len=2048, precision="autocast-bf16", dp=64)


def backward(model, run, nodes):
    predicted = step(model, run, H100, nodes)
    forward, back = predicted.layer["forward"], predicted.layer["backward"]
    return predicted.compute * back / (forward + back), predicted


def test_the_peak_is_twenty_bytes_per_parameter_and_two_tensors_of_the_head():
    by_hand = 20 * N + 2 * SPEC.vocab * (SPEC.hidden + RUN.seq_len)
    for dp in (8, 64):
        assert lab.estimate(MODEL_8B, replace(RUN, dp=dp), H100).peak_allocated == pytest.approx(by_hand, rel=1e-3)
    alone = lab.estimate(MODEL_8B, replace(RUN, dp=1), H100).peak_allocated
    assert alone == pytest.approx(by_hand - 2 * N, rel=2e-3)


def test_messages_update_and_whole_step_on_eight_gpus():
    nvlink, messages, predicted = link("NVLink-4"), 5 * SPEC.layers + 2, step(MODEL_8B, RUN, H100, FAST)
    sent = messages * (base_seconds() + 14 * nvlink.step) + 2 * 7 / 8 * 2 * N / nvlink.switched
    assert predicted.data_sent == pytest.approx(sent, rel=0.1)
    update = 40 * N / efficiency(H100).bandwidth
    assert predicted.update == pytest.approx(update, rel=0.01)
    exposed = EDGES / N * predicted.data_sent
    assert predicted.data_exposed == pytest.approx(exposed, rel=0.1)
    slowdown = training_rates()["scale"]["contention"] * (predicted.data_sent - exposed)
    assert predicted.seconds == pytest.approx(predicted.compute + exposed + slowdown + update, rel=0.01)


def test_a_step_on_512_gpus_is_mostly_longer_for_stragglers_and_slowdown():
    one, many = (step(MODEL_8B, replace(RUN, dp=dp), H100, FAST) for dp in (1, 512))
    assert many.scale > many.data - many.data_exposed > many.data_exposed
    copies = 8 * N / efficiency(H100).bandwidth  # of gradients into buckets and back
    assert many.seconds - one.seconds == pytest.approx(many.scale + many.data + copies, rel=0.01)


def test_no_bucket_hides_messages_that_take_longer_than_the_backward_pass():
    took, predicted = backward(MODEL, SMALL, SHARED)
    assert predicted.data_sent > 1.3 * took
    assert predicted.data_exposed >= predicted.data_sent - took
    for size in (2**18, 25 * 2**20, 100 * 2**20):
        during, after = (
            step(MODEL, SMALL, H100, SHARED, overlap=overlap, bucket_bytes=size) for overlap in (("data",), ())
        )
        assert after.data - during.data <= took


@pytest.mark.parametrize("model, run", [(MODEL, SMALL), (MODEL_8B, replace(SMALL, micro_batch=1, seq_len=4096))])
def test_the_bound_depends_on_the_model_by_the_rate_of_its_backward_pass(model, run):
    took, predicted = backward(model, run, SHARED)
    rate = 4 * lab.model(model).parameters * run.tokens / took
    bound = 2 * 63 / 64 * rate / SHARED.group(64).bandwidth
    assert rate < 0.6 * efficiency(H100).matmul["bf16"]
    assert run.tokens * predicted.data_sent / took == pytest.approx(bound, rel=0.16)  # the rest is latency


def test_the_worked_problems():
    matmul = efficiency(H100).matmul["bf16"]
    assert 4 / 6 * 7 / 8 * matmul / link("NVLink-4").switched == pytest.approx(761, abs=1)
    ethernet = cluster(H100, "Ethernet-100", adapters=1)
    assert 4 / 6 * 15 / 16 * matmul / ethernet.group(16).bandwidth == pytest.approx(32_300, rel=0.01)
    many = step(MODEL_8B, replace(RUN, dp=16, accumulation=36), H100, ethernet)
    assert 0.08 < many.data_exposed / many.compute < 0.1
