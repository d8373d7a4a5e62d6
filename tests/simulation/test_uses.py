"""Whole numbers and flags read from the simulated GPU: a value goes through, a size is refused by its line."""

import runpy
import sys
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from llmlab.base.errors import NotAvailable
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="instructions have no positions")
WORDS = [chr(65 + number) for number in range(8)]


@pytest.fixture
def tokens():
    """Token ids that the GPU computed, (4,)."""
    with simulator("T4"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield nn.Linear(16, 8).cuda()(torch.randn(4, 16, device="cuda")).argmax(-1)


def decoded(tokens):
    return "".join(WORDS[int(each)] for each in tokens)


def looked_up(tokens):
    return WORDS[tokens[0]] + WORDS[tokens[1].item()] + {0: "b"}[int(tokens[2])]


def told(tokens):
    return "%d of %d" % (tokens[0].item(), 3) + f" {int(tokens.sum().item() / 2)} {chr(65 + tokens[0].item())}"  # noqa: UP031


def counted(tokens):
    right, seen = 0, []
    for each in tokens:
        judged = int(each == 3)
        right += judged
        seen.append(judged)
        if not judged:
            print("wrong")
    return f"{right / len(seen):.2f}"


def matrix(tokens):
    found = torch.zeros(8, 8, dtype=torch.long)
    for each in tokens.cpu():
        found[each, each] += 1
    return int(found[0, 0])


def accuracy(tokens):
    return int((tokens == 3).sum()) / 4


@pytest.mark.parametrize(("read", "gives"), [
    (decoded, "AAAA"), (looked_up, "AAb"), (told, "0 of 3 0 A"), (counted, "0.00"), (matrix, 4), (accuracy, 0.0),
])  # fmt: skip
def test_what_is_shown_stored_looked_up_or_compared_goes_through(tokens, read, gives):
    assert read(tokens) == gives


def cut(tokens):
    return torch.randn(4, 16, device="cuda")[:, : int(tokens.max())]


def cut_later(tokens):
    longest = int(tokens.max())
    print(longest)
    return torch.randn(4, 16, device="cuda")[:, :longest]


def padded(tokens):
    longest = int(tokens.max()) + 1
    return torch.zeros(4, longest)


def counted_to(tokens):
    return [each for each in range(int(tokens.max()))]


def given_away(tokens):
    return int(tokens.max())


def split(tokens):
    return torch.randn(4, 16, device="cuda").split(tokens.tolist())


def longest_of(tokens):
    return torch.empty(4, max(tokens.tolist()) + 1, device="cuda")


def repeated(tokens):
    return [0] * int(tokens.max())


@pytest.mark.parametrize("size", [cut, cut_later, padded, counted_to, given_away, split, longest_of, repeated])
def test_what_may_become_a_size_is_refused_and_assume_helps(tokens, size):
    with pytest.raises(NotAvailable, match=r"assume=1\.0.*test_uses\.py, line"):
        size(tokens)


@pytest.mark.parametrize("size", [cut, cut_later, padded, counted_to, given_away, longest_of, repeated])
def test_assume_gives_sizes(size):
    with simulator("T4", assume=1.0):
        size(torch.randn(4, 8, device="cuda").argmax(-1))


def test_a_list_of_whole_numbers_is_shown_as_unknown_and_counts_as_zero(tokens):
    numbers = tokens.tolist()
    assert str(numbers) == "[?, ?, ?, ?]" and Counter(numbers) == {0: 4} and np.array(numbers).sum() == 0
    assert torch.tensor(numbers).shape == (4,) and f"{sum(numbers) / 4:.1f}" == "?"


def test_anomaly_detection_finds_none(tokens):
    x = torch.randn(4, device="cuda", requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        (x * 2).sum().backward()


def test_what_scripts_ask_of_cuda_besides_memory_has_an_answer():
    with simulator("A100-80GB"):
        found = torch.cuda.get_device_properties(0)
        assert found.shared_memory_per_multiprocessor == 164 * 1024 and found.max_threads_per_multi_processor == 2048
        assert str(found.L2_cache_size) == "?" and len(torch.cuda.nccl.version()) == 3
        torch.backends.cuda.preferred_linalg_library("cusolver")
        torch.backends.cuda.preferred_blas_library("cublas")
        with torch.autograd.profiler.emit_nvtx():
            assert torch.cuda.Stream(priority=torch.cuda.Stream.priority_range()[1]).query()
        with pytest.raises(NotAvailable, match="cublaslt"):
            torch.backends.cuda.preferred_blas_library("cublaslt")
        with pytest.raises(NotAvailable, match="graphs are not simulated"):
            torch.cuda.graph_pool_handle()


def test_a_flag_is_false(tokens):
    with pytest.warns(UserWarning, match=r"bool\(\)"):
        assert (1 if (tokens == 3).all() else 2) == 2


ASSERTIONS = """
same = tokens == tokens.flip(0)
assert same.all()
assert not same.any()
assert same.all() and not (same.any() or bool(same[0])), "these are alike"
assert tokens.float().mean().item() > 99
"""


def test_assertions_hold(tokens, tmp_path):
    script = tmp_path / "script.py"  # pytest rewrites its own files' assertions
    script.write_text(ASSERTIONS)
    runpy.run_path(str(script), {"tokens": tokens})


def test_a_loop_that_a_placeholder_keeps_going_is_refused(tokens):
    with pytest.raises(NotAvailable, match="kept a loop going 1000 times"):
        while not (tokens == 3).all():
            pass
