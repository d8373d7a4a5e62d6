"""The sums that the chapter on pipeline parallelism does by hand agree with the estimate."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import H100, MODEL_70B, job, states
from llmlab.course.techniques.pipeline_schedules import bubble_formula, in_flight, schedule
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.states import states as stage_states
from llmlab.formulas.memory.step import step_memory
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.efficiency import efficiency
from llmlab.hardware.links import base_seconds, cluster, link

NODES, SPEC, GIB = cluster(H100, "InfiniBand-NDR"), lab.model(MODEL_70B), 2**30
RUN = replace(job("15-pipeline"), virtual_stages=1)
TENSOR = job("14-tensor-and-sequence-parallel")
L, h, T, m, pp = SPEC.layers, SPEC.hidden, RUN.tokens, RUN.accumulation, RUN.pp


def saved(spec):
    return 20 * spec.hidden + 4 * spec.kv_heads * spec.head_dim + 4 * spec.heads + 8 * spec.intermediate


def peak(run, stage):
    return max(moment.total for moment in step_memory(share_of(SPEC, run, lab.gpu(H100), stage=stage)).moments())


def test_a_pipeline_on_a_fixed_batch_has_two_micro_batches_per_stage():
    assert (RUN.world_size, RUN.global_batch, m) == (512, 1024, 2 * pp)
    assert {state.run.global_batch for state in states("15-pipeline")} == {1024}


def test_memory_of_the_first_and_the_last_stage():
    parameters = stage_states(SPEC, RUN, 0).weights / 2
    fixed = 4 * parameters + 12 * parameters / RUN.dp
    sent, mlp = pp * 2 * T * h, 6 * T * SPEC.intermediate
    plain = replace(RUN, checkpointing=None)
    assert peak(plain, 0) == pytest.approx(fixed + L * T * saved(SPEC) + sent + mlp, rel=0.002)
    assert peak(RUN, 0) == pytest.approx(fixed + L * 2 * T * h + sent + T * saved(SPEC) + mlp, rel=0.002)
    assert peak(RUN, pp - 1) == pytest.approx(fixed + L / pp * 2 * T * h + 14 * T * SPEC.vocab, rel=0.01)
    room = lab.gpu(H100).room(1)
    assert [peak(plain, stage) > room for stage in range(pp)] == [True] * 6 + [False] * 2
    assert max(peak(RUN, stage) for stage in range(pp)) < room
    assert 8 * parameters > 0.9 * room  # DualPipe


def test_the_whole_step():
    predicted = step(MODEL_70B, RUN, H100, NODES)
    layer, last = predicted.layer["forward"] + predicted.layer["backward"], predicted.compute / m
    head = last - L / pp * layer
    assert 0.8 * layer < head < layer  # so no other cut of whole layers is faster
    send = 2 * T * h / NODES.across.reached + NODES.across.step + base_seconds()
    rest = predicted.data + predicted.update + predicted.scale
    by_hand = m * last + (pp - 1) * L / pp * layer + 2 * (m + pp - 1) * send + rest
    assert predicted.seconds == pytest.approx(by_hand, rel=1e-3)
    best = ((pp - 1) * L / pp * layer / (2 * m * send)) ** 0.5
    assert best == pytest.approx(9.4, abs=0.1)


def test_interleaving_almost_reaches_tensor_parallelism():
    speeds = {v: lab.estimate(MODEL_70B, replace(RUN, virtual_stages=v), H100).tokens_per_second for v in (1, 2, 5, 10)}
    assert list(speeds.values()) == sorted(speeds.values())
    tensor = lab.estimate(MODEL_70B, TENSOR, H100).tokens_per_second
    assert 0.95 < speeds[10] / tensor < 1 and speeds[1] / tensor < 0.8
    both = step(MODEL_70B, replace(TENSOR, checkpointing="full"), H100, NODES).seconds
    assert step(MODEL_70B, replace(RUN, virtual_stages=10), H100, NODES).seconds / both == pytest.approx(0.82, abs=0.01)
    assert in_flight(schedule("interleaved", pp, m, 10))[0] == pytest.approx(8.7)


def test_the_worked_problems():
    matmul = efficiency(H100).matmul["bf16"]
    assert matmul / (24 * h * NODES.across.reached) == pytest.approx(0.066, abs=0.001)
    assert matmul / (18 * 4096 * link("Ethernet-100").reached / 8) == pytest.approx(5.6, abs=0.05)
    few, many = (bubble_formula("interleaved", 16, count, 8) for count in (16, 32))
    assert 43 * (1 - few) / (1 - many) == pytest.approx(40.7, abs=0.05)


def test_the_pencil_problem():
    spec = lab.model("meta-llama/Llama-3.1-8B")
    assert saved(spec) == 200_832
    run = lab.Training(seq_len=4096, precision="mixed-bf16", pp=4, accumulation=8)
    activations = lab.estimate(spec, run, H100).parts["activations"]
    assert activations == pytest.approx(32 * 4096 * saved(spec), rel=0.01)
