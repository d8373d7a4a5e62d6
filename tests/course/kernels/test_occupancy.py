"""Blocks per multiprocessor are those of NVIDIA's own header, which Triton's wheel carries."""

import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.kernels.occupancy import LIMITS, blocks_by, occupancy
from llmlab.course.kernels.rungs import triton

CARDS = ("T4", "A100-80GB", "A10", "L4", "H100-80GB")
KERNELS = list(product((32, 96, 128, 256, 512, 1024), (16, 33, 40, 64, 128, 255), (0, 1000, 8192, 40000)))
ASK = """
#include <cstdio>
#include <cuda_occupancy.h>
int main() {
    int major, minor, most, shared, kept, threads, registers, bytes;
    while (scanf("%d %d %d %d %d %d %d %d", &major, &minor, &most, &shared, &kept, &threads, &registers, &bytes) == 8) {
        cudaOccDeviceProp card;
        card.computeMajor = major, card.computeMinor = minor;
        card.maxThreadsPerBlock = 1024, card.maxThreadsPerMultiprocessor = most;
        card.regsPerBlock = card.regsPerMultiprocessor = 65536;
        card.warpSize = 32, card.numSms = 1;
        card.sharedMemPerBlock = 49152, card.sharedMemPerMultiprocessor = shared;
        card.sharedMemPerBlockOptin = shared - kept, card.reservedSharedMemPerBlock = kept;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = bytes;
        cudaOccDeviceState state;
        cudaOccResult found;
        cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&found, &card, &kernel, &state, threads, 0);
        printf("%d %d\\n", error, found.activeBlocksPerMultiprocessor);
    }
}
"""
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "ask.cpp").write_text(ASK)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    command = [COMPILER, "-w", f"-I{include}", "ask.cpp", "-o", "ask"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "ask"


@pytest.mark.skipif(COMPILER is None or triton is None, reason="needs a C++ compiler and Triton's wheel")
@pytest.mark.parametrize("name", CARDS)
def test_blocks_are_those_of_nvidias_header(header, name):
    card = lab.gpu(name)
    has = LIMITS[card.compute_capability]
    start = (*card.compute_capability, has.threads, has.shared, has.system)
    asked = "\n".join(" ".join(map(str, (*start, *kernel))) for kernel in KERNELS)
    answered = subprocess.run([header], input=asked, capture_output=True, text=True, check=True).stdout.split("\n")
    for kernel, line in zip(KERNELS, answered, strict=False):
        error, blocks = map(int, line.split())
        assert error == 0
        assert min(blocks_by(*kernel, card).values()) == blocks, kernel


def test_a_full_multiprocessor_and_one_that_registers_leave_empty():
    a100 = lab.gpu("A100-80GB")
    assert occupancy(1024, 32, 8192, a100) == 1
    assert occupancy(1024, 40, 8192, a100) == 0.5  # a second block lacks registers
    assert occupancy(256, 255, 0, a100) == 0.125


def test_a_card_without_known_limits_is_refused():
    with pytest.raises(SpecError, match=r"limits are known for 7\.5, 8\.0"):
        blocks_by(256, 32, 0, lab.gpu("MI300X"))
