"""The Triton kernels compile for GPUs that this machine lacks, with ptxas alone: no interpreter, no GPU."""

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")


FUSED = {arch: ("--arch", str(arch), "--kernel", "rms_norm", "--dtype", "fp16") for arch in (75, 80, 90)}
WIDE = {kernel: ("--arch", "80", "--kernel", kernel, "--dtype", "bf16") for kernel in ("softmax", "cross_entropy")}
ATTENTION = {
    (arch, dtype, head): ("--arch", str(arch), "--kernel", "attention", "--dtype", dtype, "--head", str(head))
    for arch, dtype in ((75, "fp16"), (80, "bf16"), (90, "bf16"))
    for head in (64, 128)
    if (arch, head) != (90, 64)
}
ONE_AFTER_ANOTHER = """
import json, sys
from llmlab.kernels.ptx import main
for arguments in json.load(sys.stdin):
    main(arguments, standalone_mode=False)
"""


@pytest.fixture(scope="module")
def compiled():
    """By arguments, the rows that llmlab.kernels.ptx prints: (kernel, dtype, sm, registers, spills, shared).

    In one process: to start one, with torch and Triton, takes longer than to compile a kernel.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [*FUSED.values(), *WIDE.values(), *ATTENTION.values()]
    command = [sys.executable, "-W", "ignore", "-c", ONE_AFTER_ANOTHER]
    done = subprocess.run(command, env=environment, input=json.dumps(asked), capture_output=True, text=True, check=True)
    header, *tables = re.split(r"^kernel .*\n", done.stdout, flags=re.MULTILINE)
    assert header == ""
    found = {}
    for arguments, table in zip(asked, tables, strict=True):
        rows = [line.rsplit(maxsplit=5) for line in table.splitlines()]
        found[arguments] = [(kernel, dtype, *map(int, numbers)) for kernel, dtype, *numbers in rows]
    return found


@pytest.mark.parametrize("arch", FUSED)
def test_a_fused_kernel_compiles_without_spills(compiled, arch):
    """RMSNorm at 4096 columns holds a row in registers; the others are compiled by `python -m llmlab.kernels.ptx`."""
    rows = compiled[FUSED[arch]]
    assert [row[0].split()[0] for row in rows] == ["rms_norm.forward_kernel", "rms_norm.backward_kernel"]
    assert all(sm == arch and 0 < registers <= 255 and spills == 0 for *_, sm, registers, spills, _shared in rows)


@pytest.mark.parametrize(("kernel", "count"), [("softmax", 3), ("cross_entropy", 2)])
def test_wide_rows_compile_tile_by_tile_without_spills(compiled, kernel, count):
    rows = compiled[WIDE[kernel]]
    assert len(rows) == count
    assert all(0 < registers <= 255 and spills == 0 for *_, _sm, registers, spills, _shared in rows)


@pytest.mark.parametrize(("arch", "dtype", "head"), ATTENTION)
def test_attentions_tiles_fit_in_registers_and_shared_memory(compiled, arch, dtype, head):
    """Forward, row sums, dk with dv, and dq. The limit of shared memory per block: CUDA C++ guide, table 27."""
    rows = compiled[ATTENTION[arch, dtype, head]]
    assert len(rows) == 4
    for kernel, _dtype, _sm, registers, spills, shared in rows:
        assert registers <= 255 and spills == 0, kernel
        assert shared <= {75: 64, 80: 163, 90: 227}[arch] * 1024, kernel


LOOPS = """
import re
from llmlab.kernels import ptx

for file, name in (("cross_entropy", "loss_kernel"), ("softmax", "softmax_wide"), ("rms_norm", "backward_kernel")):
    (asked,) = [each for each in ptx.kernels(80) if each[:3] == (file, name, "bf16")]
    code = ptx.compiled(*asked, 80).asm["ptx"]
    labels = {found[1]: found.start() for found in re.finditer(r"^([$]L\\w+):", code, re.MULTILINE)}
    back = [(labels[found[1]], found.start()) for found in re.finditer(r"bra[.\\w]*\\s+([$]L\\w+);", code)
            if labels.get(found[1], len(code)) < found.start()]
    loops = "".join(code[start:end] for start, end in back)
    print(name, len(back), *(len(re.findall(what, loops)) for what in ("bar.sync", "shfl", "cp.async.c[ag]")))
"""


def test_threads_of_a_row_meet_at_its_end_and_backwards_next_row_is_on_its_way():
    """In the loops that Triton compiles for an A100: barriers, exchanges between threads, asynchronous copies."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", LOOPS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = {name: list(map(int, counts)) for name, *counts in map(str.split, done.stdout.splitlines())}
    assert found["loss_kernel"] == [1, 0, 0, 0] and found["softmax_wide"] == [2, 0, 0, 0]
    loops, barriers, _exchanges, copies = found["backward_kernel"]
    assert loops == 1 and barriers and copies == 3  # 1/rms, x and dy


def test_the_interpreter_compiles_nothing_and_says_so():
    command = [sys.executable, "-m", "llmlab.kernels.ptx"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and "without TRITON_INTERPRET=1" in done.stderr
    assert "Traceback" not in done.stderr
