"""An operator that is not run again gives what torch's fake mode gives: form, device, storage, and its refusals."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import llmlab as lab
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.engine import shape_cache as repeats
from llmlab.simulation.engine.engine import HOST, Engine
from llmlab.simulation.engine.shape_cache import Repeats

GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 128, "vocab_size": 500}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 172, "vocab_size": 500,
         "max_position_embeddings": 128}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
aten = torch.ops.aten
REFUSALS = (RuntimeError, TypeError, IndexError, ValueError)
T4, CPU = "T4", "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)

STEPS = [
    (GPT, lab.Training(2, 64, "autocast-fp16", attention="eager", checkpointing="full"), T4),
    (GPT, lab.Training(2, 64, "fp32", "adafactor", accumulation=2), CPU),
    (GPT, lab.Training(2, 64, "mixed-fp16", "lion", "selective"), T4),
    (LLAMA, lab.Training(2, 64, "bf16", "adamw-8bit"), CPU),
    (LLAMA, lab.Training(2, 64, "fp16", lora=lab.LoRA(4), quantization="nf4", checkpointing="full"), T4),
    (LLAMA, lab.Training(2, 64, "bf16", zero=3, dp=2), "A100-40GB"),
    (MIXTRAL, lab.Training(2, 64, "bf16"), "A100-40GB"),
    (LLAMA, lab.Inference(2, 32, 4, weights="bf16", kv="bf16"), "A100-40GB"),
]


def look(value: Any, given: list[Tensor]) -> Any:
    """Return all that can be told of an operator's output; of a storage, which of the given tensors' it is."""
    if not isinstance(value, Tensor):
        return tuple(look(each, given) for each in value) if isinstance(value, (list, tuple)) else value
    storage = value.untyped_storage()
    shares = [each.untyped_storage()._cdata == storage._cdata for each in given]
    # Of a dimension of one element, torch's fake mode gives another step than the kernel; it is never taken.
    steps = [step for size, step in zip(value.shape, value.stride(), strict=True) if size != 1]
    return (type(value), value.shape, steps, value.dtype, value.device, value.storage_offset(),
            storage.nbytes(), value.requires_grad, value.is_inference(), value.is_conj(), value.is_neg(),
            getattr(value, "constant", None), shares)  # fmt: skip


def asked_each_time(self: Repeats, func: Any, args: tuple, kwargs: dict, fake: Any = None) -> Any:
    """In the place of Repeats.run: it remembers nothing."""
    return fake() if fake else func(*args, **kwargs)


def check(repeats: Repeats, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator in both ways."""
    given = [each for each in args if isinstance(each, FakeTensor)]
    try:
        out = repeats.run(func, args, kwargs)
    except REFUSALS as error:
        with pytest.raises(type(error)):
            func(*args, **kwargs)
        raise
    seen = look(out, given)  # before torch changes it
    try:
        expected = func(*args, **kwargs)
    except REFUSALS as error:
        raise AssertionError(f"torch refuses {func}: {error}") from error
    assert type(out) is type(expected)
    assert seen == look(expected, given), func
    assert not isinstance(out, FakeTensor) or any(out is each for each in given) == any(expected is e for e in given)
    return out


class Both(TorchDispatchMode):
    """Each operator twice, so that the second is one that was seen."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.repeats = Repeats(fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        check(self.repeats, func, args, kwargs or {})
        return check(self.repeats, func, args, kwargs or {})


@contextmanager
def both() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, Both(fake):
        yield


@pytest.mark.parametrize(("model", "run", "card"), STEPS, ids=str)
def test_a_step_runs_the_same_operators_on_the_same_tensors(monkeypatch, model, run, card):
    plain, answered = Repeats.run, []

    def run_both(self, func, args, kwargs, fake=None):
        answered.append(repeats._gives(func) is not None)
        out = plain(self, func, args, kwargs, fake)
        if answered[-1]:
            given = [each for each in args if isinstance(each, FakeTensor)]
            expected = fake() if fake else func(*args, **kwargs)
            assert look(out, given) == look(expected, given), func
        return out

    monkeypatch.setattr(Repeats, "run", run_both)
    lab.simulate(model, run, card)
    assert sum(answered) > 0.8 * len(answered) > 100


@pytest.mark.parametrize(("model", "run", "card"), STEPS[::2], ids=str)
def test_a_step_without_it_is_the_same_step(monkeypatch, model, run, card):
    expected = lab.simulate(model, run, card)
    monkeypatch.setattr(Repeats, "run", asked_each_time)
    report = lab.simulate(model, run, card)
    # What a checkpointed block kept dies at once, in the order of a set: only the timeline shows which first.
    assert replace(report, timeline=()) == replace(expected, timeline=())


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.dtype, list[int], str]:
    return draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3)), draw(
        st.sampled_from(("plain", "turned", "cut", "spread", "kept")))  # fmt: skip


def made(dtype: torch.dtype, shape: list[int], how: str) -> Tensor:
    if how == "turned":
        return torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    if how == "cut" and shape:
        return torch.empty([shape[0] + 1, *shape[1:]], dtype=dtype)[1:]
    if how == "spread":
        return torch.empty([1] * len(shape), dtype=dtype).expand(shape)
    return torch.empty(shape, dtype=dtype, device="cpu:0" if how == "kept" else "cpu")


OPERATORS = [
    lambda a, b: a + b, lambda a, b: a * 2, lambda a, b: a * 2.0, lambda a, b: a * True, lambda a, b: a / b,
    lambda a, b: a == b, lambda a, b: torch.where(a > 0, a, b), lambda a, b: a.clone(), lambda a, b: a.float(),
    lambda a, b: torch.zeros_like(a), lambda a, b: torch.zeros_like(a, dtype=torch.int32), lambda a, b: a.sum(),
    lambda a, b: torch.cat([a, a]), lambda a, b: torch.stack([a, b]), lambda a, b: a.add_(b), lambda a, b: a.mul_(2),
    lambda a, b: a.zero_(), lambda a, b: a.copy_(b), lambda a, b: a.t(), lambda a, b: a.reshape(-1),
    lambda a, b: a.unsqueeze(0).expand(2, *a.shape), lambda a, b: a.chunk(2), lambda a, b: a.unbind(0),
    lambda a, b: a.max(0), lambda a, b: a @ b, lambda a, b: a.float().softmax(-1), lambda a, b: a.contiguous(),
    lambda a, b: torch._foreach_add([a, b], 1.0), lambda a, b: a.detach(), lambda a, b: a.view(torch.int16),
    lambda a, b: a.bfloat16().resize_(7), lambda a, b: a.to("cpu:0"),
    lambda a, b: torch.add(a, b, out=b), lambda a, b: a[:, None], lambda a, b: a.new_empty(2, 2),
    lambda a, b: a.conj() * b, lambda a, b: a.conj().imag + 1, lambda a, b: a.set_(b), lambda a, b: a.conj().imag[:1],
]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(OPERATORS), tensors(), tensors()), min_size=1, max_size=6))
def test_any_operators_on_any_tensors_give_what_torch_gives_or_refuse_as_it_does(calls):
    with both():
        for operator, first, second in calls * 2:
            with suppress(*REFUSALS):
                operator(made(*first), made(*second))


def test_numbers_that_are_equal_give_other_dtypes():
    with both():
        x = torch.ones(2, dtype=torch.bool)
        assert [(x * 1).dtype, (x * 1.0).dtype, (x * True).dtype] == [torch.int64, torch.float32, torch.bool]


def test_the_default_dtype_counts():
    with both():
        x = torch.ones(2, dtype=torch.int64)
        torch.set_default_dtype(torch.float64)
        try:
            wide = x / 2
        finally:
            torch.set_default_dtype(torch.float32)
        assert [wide.dtype, (x / 2).dtype] == [torch.float64, torch.float32]


def test_the_device_of_the_input_is_the_outputs():
    with both():
        devices = [torch.device(name) for name in ("cpu", "cpu:0", "cpu")]
        assert [(torch.ones(2, device=device) * 2).device for device in devices] == devices


def test_lists_of_numbers_end_where_they_end():
    with both():
        x, w, rest = torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3), ([1], False, [0], 1)
        shapes = [aten.convolution(x, w, None, *sizes, *rest).shape for sizes in (([2], [1, 1]), ([2, 1], [1]))]
        assert [tuple(shape[2:]) for shape in shapes] == [(4, 4), (4, 8)]


def test_in_inference_mode_outputs_are_inference_tensors():
    with both():
        x = torch.ones(2)
        assert not (x * 2).is_inference()
        with torch.inference_mode():
            assert (torch.ones(2) * 2).is_inference()


def test_a_number_that_torch_knows_stays_known():
    with both():
        assert (torch.tensor(3.0) * torch.tensor(2.0)).constant == 6


def test_an_output_that_is_not_all_of_its_own_storage_is_not_remembered(monkeypatch):
    with both():
        assert repeats._form(torch.ones(4)) == ((4,), (1,), torch.float32, torch.device("cpu"))
        assert repeats._form(torch.ones(4)[1:]) is repeats._form(torch.ones(4)[:3]) is None
    monkeypatch.setattr(repeats, "UNSAFE_VIEW", None)
    repeats._gives.cache_clear()
    try:
        with both():
            aten._unsafe_view(torch.ones(4), [2, 2])
    finally:
        monkeypatch.undo()
        repeats._gives.cache_clear()


def test_a_mode_around_the_simulation_sees_each_operator(monkeypatch):
    run, counts = lab.Training(2, 64, "fp32"), []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            lab.simulate(GPT, run, "T4")
        counts.append(counter.get_total_flops())
        monkeypatch.setattr(Repeats, "run", asked_each_time)
    assert counts[0] == counts[1] > 1e6


def test_a_product_of_shapes_that_do_not_fit_is_refused_each_time():
    with lab.simulator("T4"):
        a, b = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
        for _ in range(3):
            with pytest.raises(RuntimeError, match="must have same reduction dim"):
                a @ b
            (a @ b.T).sum()


def test_a_tensor_takes_the_storage_of_another_each_time():
    with both():
        for _ in range(2):
            torch.ones(2).set_(torch.ones(2))


def test_an_operator_on_tensors_of_one_form_is_run_once():
    """In place, its output is its input, which has no form of its own."""
    engine = Engine(HOST, HostMemory())
    with engine, torch.no_grad():
        x = torch.empty(4, 8)
        for _ in range(3):
            x + x
            x.add_(x)
    made, changed = (value for key, value in engine.repeats._given.items() if "add" in key[0]._schema.name)
    assert [form.shape for form in made[0]] == [(4, 8)] and changed is None
