"""The Triton kernels compile for GPUs that this machine lacks, with ptxas alone: no interpreter, no GPU."""

import json
import os
import re
import subprocess
import sys

import pytest

import llmlab as lab
from llmlab.course.kernels import ptx
from llmlab.course.kernels.ladder.attention import tiles_for
from llmlab.course.kernels.occupancy import blocks_by

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
from llmlab.course.kernels.ptx import main
for arguments in json.load(sys.stdin):
    main(arguments, standalone_mode=False)
"""


@pytest.fixture(scope="module")
def compiled():
    """By arguments, the rows that llmlab.course.kernels.ptx prints: (kernel, dtype, sm, registers, spills, shared).

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
    """RMSNorm at 4096 columns holds a row in registers; `python -m llmlab.course.kernels.ptx` compiles the others."""
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


# The obvious loop of the loss kernel, which sums up each tile, as the chapter on kernels builds it.
BY_TILES = """
import triton
import triton.language as tl

@triton.jit
def loss_by_tiles(X, LSE, N, BLOCK: tl.constexpr):
    row, highest, total = tl.program_id(0), -3.4e38, 0.0
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(X + row * N + column, mask=column < N, other=-float("inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        new = tl.sum(tl.exp(x - higher), 0)
        total, highest = total * tl.exp(highest - higher) + new, higher
    tl.store(LSE + row, highest + tl.log(total))
"""


@pytest.fixture(scope="module")
def on_an_a100(tmp_path_factory):
    """By name, (`ptx.loops`, `ptx.compile_kernel`) of loops for bf16 at the sizes of Llama 3 8B."""
    file = tmp_path_factory.mktemp("kernels") / "own.py"
    file.write_text(BY_TILES)
    known = {each[:2]: each for each in ptx.kernels(80) if each[2] == "bf16"}
    *back, constants, options = known["rms_norm", "backward_kernel"]
    assert constants["STAGES"] == 2
    asked = {
        "loss": known["cross_entropy", "loss_kernel"],
        "loss by tiles": (str(file), "loss_by_tiles", "bf16", {"BLOCK": 8192}, {"num_warps": 16}),
        "softmax": known["softmax", "softmax_wide"],
        "backward": (*back, constants, options),
        "backward, 1 stage": (*back, {**constants, "STAGES": 1}, options),
    }
    given = [(*each, 80) for each in asked.values()]
    found = (ptx.in_its_own_process(name, given) for name in ("loops", "compile_kernel"))
    return dict(zip(asked, zip(*found, strict=True), strict=True))


def test_threads_of_a_row_meet_at_its_end(on_an_a100):
    """The obvious loop waits four times per tile, and takes fewer registers, so that more blocks fit."""
    (loss, takes), (by_tiles, takes_by_tiles) = (on_an_a100[name] for name in ("loss", "loss by tiles"))
    assert loss == {"loops": 1, "barriers": 0, "exchanges": 0, "copies": 0}
    assert by_tiles == {"loops": 1, "barriers": 4, "exchanges": 18, "copies": 0}
    assert on_an_a100["softmax"][0] == {"loops": 2, "barriers": 0, "exchanges": 0, "copies": 0}
    a100 = lab.gpu("A100-80GB")
    fit = [min(blocks_by(512, int(each[3]), int(each[5]), a100).values()) for each in (takes, takes_by_tiles)]
    assert fit == [2, 4]


def test_backwards_next_row_is_on_its_way(on_an_a100):
    (two, _), (one, _) = (on_an_a100[name] for name in ("backward", "backward, 1 stage"))
    assert two["barriers"] == one["barriers"] > 0
    assert (two["copies"], one["copies"]) == (3, 0)  # 1/rms, x and dy


def test_backwards_tile_is_the_largest_that_spills_nothing():
    """dk and dv at head size 64: twice the other rows spill on an A100, with two stages more; an H100 takes them."""
    asked = [
        ("attention", "keys_kernel", "bf16", {"CAUSAL": True, "D": 64, "WIDTH": 64, "M": rows, "N": 128},
         {"num_warps": 8, "num_stages": stages}, arch)
        for arch, rows, stages in ((80, 32, 2), (80, 64, 1), (80, 64, 2), (90, 64, 2))
    ]  # fmt: skip
    spilled = [int(each[4]) for each in ptx.in_its_own_process("compile_kernel", asked)]
    assert spilled[0] == 0 < spilled[1] < spilled[2] and spilled[3] == 0
    for arch, rows in ((80, 32), (90, 64)):
        taken = tiles_for(64, 2, divmod(arch, 10), backward=True)
        assert taken == {"M": rows, "N": 128, "num_warps": 8, "num_stages": 2}


def test_a_kernel_that_does_not_compile_is_an_error_with_what_was_said():
    wrong = "attention", "no_such_kernel", "bf16", {}, {}, 80
    with pytest.raises(subprocess.CalledProcessError) as error:
        ptx.in_its_own_process("loops", [wrong])
    assert "no_such_kernel" in error.value.stderr


def test_the_interpreter_compiles_nothing_and_says_so():
    command = [sys.executable, "-m", "llmlab.course.kernels.ptx"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 2 and "without TRITON_INTERPRET=1" in done.stderr
    assert "Traceback" not in done.stderr
