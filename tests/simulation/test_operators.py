"""lab.simulator against what others published: single operators on an A100, BERT-large on a V100, formulas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import llmlab as lab
from benchmarks.agreement import embedding_script, formulas, operators
from benchmarks.memory import bert
from llmlab.archive import operator_records
from llmlab.base.compat import FakeTensorMode
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.engine.operators import cast_copies, changes_values_alone, is_composite, mixed_devices
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


aten = torch.ops.aten
f16, f32 = torch.float16, torch.float32
ROWS = operators.plain_rows()
HOLE = 8 * 2**20


def name(record) -> str:
    return f"{record.operator}-{record.mode}-" + "-".join(f"{key}{size}" for key, size in record.sizes.items())


def test_every_published_memory_of_plain_pytorch_is_held():
    assert len(ROWS) == 61
    assert {record.operator for record in ROWS} == set(operators.OPERATORS)


@pytest.mark.parametrize("record", [row for row in ROWS if row.operator != "embedding"], ids=name)
def test_an_operator_takes_what_the_a100_measured_to_the_byte(record):
    assert operators.compare(record).error == 0


def test_the_embedding_script_takes_what_the_a100_measured_in_all_its_rows_but_one():
    """Liger's and the compiled rows too. That one has a block of 8 MiB for its partial sums in fp32, which take less:
    1,024 indices that occur, and a tenth of the 16,384 (cuda/EmbeddingBackwardKernel.cu)."""
    rows = operator_records("embedding", metric="memory", gpu=operators.GPU)
    errors = {(row.provider, row.sizes["D"], row.sizes["V"]): operators.compare(row).error for row in rows}
    assert len(errors) == embedding_script.COMPILATIONS == 48
    far = {row: error for row, error in errors.items() if error}
    assert far == {("huggingface", 768, 1024): (16384 // 10 + 1024) * 768 * 4 - HOLE}


@pytest.mark.parametrize("setup", (bert.SETUPS[0], bert.SETUPS[3], bert.SETUPS[7]), ids=lambda s: s.name)
def test_bert_large_reserves_what_the_v100_showed_without_its_context(setup):
    assert bert.simulate_training(setup) == pytest.approx(bert.measured(setup.name), rel=0.005)


def test_the_weights_of_bert_large_reserve_what_the_v100_showed_to_the_mebibyte():
    assert bert.simulate_loading() == bert.measured(bert.LOADED) == 1290 * 2**20


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_keeps_what_the_published_formula_says_and_the_norms_statistics_it_leaves_out(recomputed):
    h, a = formulas.LAYERS["22B"]
    statistics = 0 if recomputed else 16 * formulas.s * formulas.b
    assert formulas.simulate_layer(h, a, recomputed) == formulas.layer_formula(h, a, recomputed) + statistics


@pytest.mark.parametrize("add", [torch.addmm, torch.baddbmm], ids=["addmm", "baddbmm"])
def test_what_is_multiplied_by_zero_is_not_read(add):
    """cuBLAS: with beta 0 the addend does not have to be a valid input, and Blas.cpp does not copy it."""
    shape = (4, 64, 64) if add is torch.baddbmm else (64, 64)
    size = 4 * torch.Size(shape).numel()
    with simulator("A100-40GB") as sim:
        c, a, b = (torch.empty(shape, device="cuda") for _ in range(3))
        with sim.operators() as seen:
            for beta in (1, 0):
                add(c, a, b, beta=beta)
                getattr(c, f"{add.__name__}_")(a, b, beta=beta)
    assert [kernel.bytes for kernel in seen] == [4 * size, 4 * size, 3 * size, 3 * size]


@pytest.mark.parametrize(("operator", "dtypes", "copies"), [
    (aten.add.Tensor, (f16, f32), [128]),  # the half operand, in fp32
    (aten.add.Tensor, (f16, f16), []),
    (aten.add_.Tensor, (f16, f32), [128, 128]),  # and its new value before it is narrowed
    (aten.add_.Tensor, (f32, f16), [128]),
    (aten.mul.Tensor, (torch.int64, f16), [64]),
    (aten.copy_.default, (f16, f32), []),  # casts as it copies
    (aten.mm.default, (f16, f32), []),
])  # fmt: skip
def test_a_cpu_casts_operands_of_another_dtype_into_copies(operator, dtypes, copies):
    """TensorIterator.cpp, compute_types; of 32 elements."""
    assert cast_copies(operator, tuple(torch.empty(4, 8, dtype=dtype) for dtype in dtypes)) == copies


def test_lists_are_compared_position_by_position():
    card, host = torch.empty(2, device="meta"), torch.empty(2)
    number = torch.tensor(1.0)
    add, copy = aten._foreach_add_.List, aten._foreach_copy_.default
    assert mixed_devices(add, ([card, host], [card, host])) is None
    assert mixed_devices(add, ([card, host], [card, card])) == (host.device, card.device)
    assert mixed_devices(add, ([card], [number])) is None and mixed_devices(copy, ([card], [host])) is None
    assert mixed_devices(aten.add.Tensor, (card, host)) is None  # torch compares these


def test_torch_decides_where_lists_have_other_shapes_or_whole_numbers():
    with FakeTensorMode():
        x, wide, whole = torch.empty(2), torch.empty(3, 2), torch.empty(2, dtype=torch.int64)
        add = aten._foreach_add_.List
        assert changes_values_alone(add, ([x, x], [x, x]))
        assert not changes_values_alone(add, ([wide], [x])) and not changes_values_alone(add, ([whole], [whole]))
        assert not changes_values_alone(aten._foreach_add.List, ([x], [x]))  # makes tensors
    assert not changes_values_alone(add, ([torch.empty(2)], [torch.empty(2)]))


def test_what_has_a_kernel_of_its_own_is_not_composite():
    assert is_composite(aten.linear.default) and is_composite(aten.matmul.default)
    assert not is_composite(aten.mm.default) and not is_composite(aten.silu_backward.default)


# ---- casts on a CPU


N = 256
HALF = torch.bfloat16


def wide(*shape: int) -> Tensor:
    return torch.ones(shape)


STEPS: dict[str, Callable[[], Tensor]] = {
    "one operand is copied": lambda: wide(N, N).to(HALF) * wide(N, N),
    "the other, and broadcast after": lambda: wide(N, N) + wide(N).to(HALF),
    "the new value too": lambda: wide(N, N).to(HALF).add_(wide(N, N)),
    "into the wider one": lambda: wide(N, N).add_(wide(N, N).to(HALF)),
    "a comparison": lambda: wide(N, N) > wide(N, N).to(HALF),
    "whole numbers": lambda: wide(N, N).long() * wide(N, N),
    "three operands": lambda: torch.addcmul(wide(N, N), wide(N, N).to(HALF), wide(N, N)),
    "a number decides nothing": lambda: wide(N, N).to(HALF) * torch.ones(()),
    "a mask stays one": lambda: wide(N, N).masked_fill(wide(N, N).bool(), 0.0),
    "a choice": lambda: torch.where(wide(N, N).bool(), wide(N, N), wide(N, N)),
    "one dtype": lambda: wide(N, N) * wide(N, N),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_simulated_cpu_copies_what_the_real_one_copies(step: Callable[[], Tensor]) -> None:
    step()
    with lab.meter("cpu") as meter:
        step()
    engine, now, timeline = Engine(HOST, HostMemory(), workspaces={}), 0, []
    with engine:
        step()
    for event in engine.events:
        now += event.size
        timeline.append(now)
    large = [size >> 10 for size in meter.timeline], [size >> 10 for size in timeline]  # without numbers' few bytes
    assert max(large[0]) == max(large[1]) and sorted({*large[0]}) == sorted({*large[1]})
