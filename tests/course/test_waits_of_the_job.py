"""Facts of the page on profiles: the optimizer of the job reads two norms of each weight, and its launches are few."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import llmlab as lab
from llmlab.course.job import GPU, MODEL, job
from llmlab.formulas.time.efficiency import efficiencies
from llmlab.formulas.time.operators import timing
from llmlab.simulation.report import recorded


@pytest.mark.parametrize(("name", "reads"), [("SGD", 0), ("AdamW", 1), ("Adafactor", 3)])
def test_an_optimizer_reads_as_many_numbers_per_weight(name, reads):
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (4,))]
    optimizer = getattr(torch.optim, name)(weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    counts = {row.key: row.count for row in profiler.key_averages()}
    assert counts.get("aten::_local_scalar_dense", 0) == reads * len(weights)


def test_the_job_reads_292_norms_and_is_bound_by_its_kernels_on_a_t4():
    run = replace(job("10-flash-attention"), kernels=None)
    operators = recorded(MODEL, run, replace(lab.gpu(GPU), memory=2**50)).operators
    names = [operator.name for operator in operators if operator.phase == "optimizer"]
    before = [previous for previous, name in pairwise(names) if name == "aten::linalg_vector_norm"]
    assert sum(name in ("aten::add_", "aten::mul_") for name in before) == 292
    adds = [operator for operator in operators if operator.phase == "optimizer" and operator.name == "aten::add_"]
    launched = [add for add in adds if add.kind != "none"]  # the CPU adds to the step counts and launches nothing
    assert len(adds) == 2 * len(launched) == 2 * 146
    times = timing(operators, efficiencies()[GPU])
    assert times.gpu == pytest.approx(times.step, rel=0.001) and times.host < times.gpu / 10
