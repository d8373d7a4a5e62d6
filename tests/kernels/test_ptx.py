"""The Triton kernels compile for GPUs that are not here: no interpreter, no GPU, ptxas alone."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")


def compiled(*arguments):
    """Rows of `python -m llmlab.kernels.ptx`, without its header: (kernel, dtype, sm, registers, spills, shared)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "llmlab.kernels.ptx", *arguments]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    rows = [line.rsplit(maxsplit=5) for line in lines]
    return [(kernel, dtype, *map(int, numbers)) for kernel, dtype, *numbers in rows]


@pytest.mark.parametrize("arch", [75, 80, 90])
def test_a_fused_kernel_compiles_without_spills(arch):
    """RMSNorm at 4096 columns holds a row in registers; the others are compiled by `python -m llmlab.kernels.ptx`."""
    rows = compiled("--arch", str(arch), "--kernel", "rms_norm", "--dtype", "fp16")
    assert [row[0].split()[0] for row in rows] == ["rms_norm.forward_kernel", "rms_norm.backward_kernel"]
    assert all(sm == arch and 0 < registers <= 255 and spills == 0 for *_, sm, registers, spills, _shared in rows)


@pytest.mark.parametrize(("kernel", "count"), [("softmax", 3), ("cross_entropy", 2)])
def test_wide_rows_compile_tile_by_tile_without_spills(kernel, count):
    rows = compiled("--arch", "80", "--kernel", kernel, "--dtype", "bf16")
    assert len(rows) == count
    assert all(0 < registers <= 255 and spills == 0 for *_, _sm, registers, spills, _shared in rows)


@pytest.mark.parametrize(
    ("arch", "dtype", "head"),
    [(75, "fp16", 64), (75, "fp16", 128), (80, "bf16", 64), (80, "bf16", 128), (90, "bf16", 128)],
)
def test_attentions_tiles_fit_in_registers_and_shared_memory(arch, dtype, head):
    """Forward, row sums, dk with dv, and dq. Shared memory a block may have: CUDA C++ guide, table 27."""
    rows = compiled("--arch", str(arch), "--kernel", "attention", "--dtype", dtype, "--head", str(head))
    assert len(rows) == 4
    for kernel, _dtype, _sm, registers, spills, shared in rows:
        assert registers <= 255 and spills == 0, kernel
        assert shared <= {75: 64, 80: 163, 90: 227}[arch] * 1024, kernel


def test_the_interpreter_compiles_nothing_and_says_so():
    command = [sys.executable, "-m", "llmlab.kernels.ptx"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and "without TRITON_INTERPRET=1" in done.stderr
    assert "Traceback" not in done.stderr
