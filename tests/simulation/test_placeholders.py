"""Placeholders for values that no GPU computed."""

import json
import warnings

import pytest
import torch

from llmlab.base.errors import LabWarning, NotAvailable
from llmlab.simulation.simulator import simulator
from llmlab.simulation.values.placeholders import PLACEHOLDER, value_for

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_a_float_read_from_the_card_is_the_placeholder():
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        assert repr(loss) == "tensor(?, device='cuda:0')"
        assert f"{loss:.2f} {loss.item():.3f} {sum([loss.item()], 0.0) / 2:.1f}" == "? ? ?"
        assert f"{loss.item():>6.2f}|{round(loss.item(), 3):<4}|{loss:8.4f}" == "     ?|?   |       ?"
        assert str(torch.rand(3000, device="cuda").cpu().tolist()[0]) == "?"
        with pytest.warns(UserWarning, match=r"float\(\).*no values"):
            assert float(loss) == PLACEHOLDER
        with pytest.warns(UserWarning, match="Tensor.numpy.*no values"):
            assert loss.cpu().numpy() == PLACEHOLDER
        with pytest.warns(UserWarning, match="from .item"):
            torch.zeros(3)[0] = loss.item()


@pytest.mark.parametrize(("compare", "taken"), [
    (lambda loss: 1 if loss > 2 else 0, 0),
    (lambda loss: loss.item() < 1.5, True),
    (lambda loss: max(loss.item(), 0.5), PLACEHOLDER),
    (lambda loss: 1 if loss.sign() == 1 else 0, 1),
    (lambda loss: bool(torch.lt(loss, loss)), False),
    (lambda loss: loss.argmax().item() == 3, False),
    (lambda loss: bool(loss.item()), True),
])  # fmt: skip
def test_a_comparison_with_a_bound_takes_the_placeholder_and_says_so(compare, taken):
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        with pytest.warns(UserWarning, match="a comparison .*1.0, or 0 for integers"):
            assert compare(loss) == taken


def test_a_line_warns_once_although_libraries_catch_warnings():
    with warnings.catch_warnings(record=True) as shown, simulator("T4"):
        warnings.simplefilter("default")
        for loss in torch.rand(3, device="cuda"):
            float(loss)
            with warnings.catch_warnings():  # Python forgets which lines have warned
                warnings.simplefilter("ignore")
    assert len(shown) == 1


def test_a_number_compared_with_itself_is_no_decision():
    with simulator("T4"), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = torch.rand(2000, device="cuda").mean().item()
        assert (loss != loss, loss == loss) == (False, True)
        assert json.loads(json.dumps({"loss": loss}, indent=2)) == {"loss": PLACEHOLDER}


@pytest.mark.parametrize("sizes", [
    lambda loss: range(int(loss.item())),
    lambda loss: range(loss.argmax().item()),
    lambda loss: [1, 2, 3][: loss.argmax().item()],
    lambda loss: torch.arange(loss, device="cuda"),
    lambda loss: torch.zeros(4)[: loss.long()],
])  # fmt: skip
def test_what_would_size_something_is_refused_with_the_line_and_a_way_that_works(sizes):
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        with pytest.raises(NotAvailable, match=r"test_placeholders\.py, line \d+"):
            sizes(loss)
    with simulator("T4", assume=1.0):
        sizes(torch.rand(2000, device="cuda").mean())


def test_torch_itself_refuses_a_size_that_is_not_known():
    with simulator("T4"), pytest.raises(TypeError, match="a value that the simulated GPU does not have"):
        torch.zeros(torch.rand(2000, device="cuda").argmax().item())


def test_assume_is_the_value_of_whole_numbers_flags_and_times_too():
    with simulator("T4", assume=1.0):
        chosen = torch.rand(4, 5000, device="cuda").argmax(-1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert [int(each) for each in chosen] == chosen.tolist() == [1, 1, 1, 1]
        assert chosen[0].item() == 1 and bool((chosen[0] > 7).any()) is False
        assert start.elapsed_time(end) == 1.0
        held = torch.zeros(4, dtype=torch.int64)
        assert held.copy_(chosen).tolist() == [1, 1, 1, 1]


def test_a_value_that_a_library_reads_is_warned_of_at_the_line_that_called_the_library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "reads.py").write_text("def positive(x):\n    return bool(x > 0)\n")
    monkeypatch.syspath_prepend(str(folder))
    import reads

    with simulator("T4"), pytest.warns(LabWarning, match="reads a placeholder") as warned:
        assert reads.positive(torch.rand(1, device="cuda"))
    assert {each.filename for each in warned} == {__file__}


@pytest.mark.parametrize(("dtype", "value"), [
    (torch.float16, 1.0), (torch.int64, 0), (torch.bool, False),
])  # fmt: skip
def test_a_placeholder_is_one_zero_or_false_unless_it_is_assumed(dtype, value):
    assert value_for(dtype, None) == value and type(value_for(dtype, None)) is type(value)
    assert value_for(dtype, 3.0) == (dtype is torch.bool or 3)  # a flag of 3 is True
