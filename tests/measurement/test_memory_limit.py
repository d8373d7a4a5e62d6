"""Out of memory for real: a process that may not have more address space than a small step takes."""

import sys
from pathlib import Path

import pytest
import torch

import llmlab as lab
from llmlab.measurement.memory_limit import available_memory, is_out_of_memory, least_bytes, limited_to_available
from llmlab.ranks.launch import launch

linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS refuses memory on Linux only")


def run_out(config):
    """Run in a process of its own, whose memory is then limited: a step that fits, one that does not, the first."""
    import resource

    small, big = lab.Training(seq_len=64), lab.Training(micro_batch=100, seq_len=128)
    before = lab.measure(config, small, device="cpu", repeats=1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = taken + 100 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    failed = lab.measure(config, big, device="cpu", repeats=1)
    after = lab.measure(config, small, device="cpu", repeats=1)
    return {
        "outcome": failed.outcome, "where": failed.where, "phases": list(failed.phases), "peak": failed.peak_allocated,
        "same": before.phases == after.phases, "limit": resource.getrlimit(resource.RLIMIT_AS)[0] == limit,
        "json": lab.Report.from_json(failed.to_json()) == failed,
    }  # fmt: skip


@linux
def test_running_out_is_an_outcome_and_the_process_goes_on(gpt2):
    assert launch(run_out, 1, gpt2) == [{
        "outcome": "out of memory", "where": "forward", "phases": ["load"], "peak": None,
        "same": True, "limit": True, "json": True,
    }]  # fmt: skip


@linux
def test_more_than_is_available_raises_while_limited_and_the_limit_is_lifted_after():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    more = available_memory() + 2**30  # before the limit: what others take meanwhile must not make it fit
    with limited_to_available():
        with pytest.raises(RuntimeError) as refused:
            torch.empty(more, dtype=torch.uint8)
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert is_out_of_memory(refused.value)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GiB, other allocations: 0 bytes)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("can't allocate memory"), False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_which_errors_mean_out_of_memory(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_least_bytes_are_the_weights(llama):
    spec = lab.model(llama)
    n = spec.parameters
    assert least_bytes(spec, lab.Training()) == least_bytes(spec, lab.Training(precision="autocast-bf16")) == 4 * n
    assert least_bytes(spec, lab.Training(precision="mixed-bf16")) == least_bytes(spec, lab.Inference()) == 2 * n
    assert least_bytes(spec, lab.Inference(weights="nf4")) < n // 2
