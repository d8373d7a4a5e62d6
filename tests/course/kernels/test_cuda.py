"""The CUDA C++ kernels compute their formulas, run on the host thread by thread."""

import ctypes
import os
import shutil
import subprocess

import pytest
import torch

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.kernels import cuda
from llmlab.course.kernels import rms_norm as ladder_rms_norm

# CUDA's additions to C++, on a CPU: one thread per thread of a block, block after block; __syncthreads is a barrier.
SHIM = """
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
#define __global__
#define __shared__ static
struct Index { unsigned x, y; };
thread_local Index threadIdx, blockIdx;
static std::barrier<> everyone(PER_BLOCK);
void __syncthreads() { everyone.arrive_and_wait(); }
"""
LAUNCH = """
static_assert(THREADS == 256);
extern "C" void launch(const float* x, const float* weight, float* y, float* inverse_rms, long long stride, int rows,
                       int columns, float eps) {
    for (unsigned row = 0; row < rows; ++row) {
        std::vector<std::thread> block;
        for (unsigned thread = 0; thread < THREADS; ++thread)
            block.emplace_back([=] {
                blockIdx = {row, 0}, threadIdx = {thread, 0};
                rms_norm_forward<float>(x, weight, y, inverse_rms, stride, columns, eps);
            });
        for (auto& thread : block) thread.join();
    }
}
"""
PRODUCT = """
extern "C" void launch(bool tiled, const float* a, const float* b, float* c, int T, int p, int q) {
    for (unsigned y = 0; y * TILE < T; ++y)
        for (unsigned x = 0; x * TILE < q; ++x) {
            std::vector<std::thread> block;
            for (unsigned thread = 0; thread < TILE * TILE; ++thread)
                block.emplace_back([=] {
                    blockIdx = {x, y}, threadIdx = {thread % TILE, thread / TILE};
                    (tiled ? matmul_tiled : matmul_naive)(a, b, c, T, p, q);
                });
            for (auto& thread : block) thread.join();
        }
}
"""
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def compiled(folder, threads, text):
    (folder / "host.cpp").write_text(f"#define PER_BLOCK {threads}\n" + SHIM + text, encoding="utf-8")
    command = [COMPILER, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "host.cpp", "-o", "host.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return ctypes.CDLL(str(folder / "host.so"))


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory):
    """`rms_norm_forward<float>`, from the same file that nvcc compiles."""
    library = compiled(tmp_path_factory.mktemp("cuda"), 256, cuda.source() + LAUNCH)

    def call(x, weight, eps):
        y, inverse_rms = torch.full(x.shape, torch.nan), torch.full((len(x),), torch.nan)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, weight, y, inverse_rms)]
        library.launch(*pointers, ctypes.c_longlong(x.stride(0)), *x.shape, ctypes.c_float(eps))
        return y, inverse_rms

    return call


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("shape", [(3, 37), (1, 1), (2, 256), (2, 1000)], ids=str)
def test_the_kernels_text_is_the_formula(on_the_host, shape):
    """Fewer columns than threads, one value, as many as threads, and a width that is no multiple of them."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(shape[0], shape[1] + 5, generator=generator)
    x, weight = wide[:, 2:-3], torch.randn(shape[1], generator=generator)  # rows that do not follow one another
    y, inverse_rms = on_the_host(x, weight, 0.1)
    exact = 1 / (x.double().square().mean(-1) + 0.1).sqrt()
    torch.testing.assert_close(inverse_rms.double(), exact, rtol=1e-5, atol=0)  # sums of up to 1000: 2^-24 each
    torch.testing.assert_close(y.double(), x.double() * exact[:, None] * weight.double(), rtol=2e-5, atol=1e-6)


def test_without_a_gpu_it_says_what_is_missing_and_what_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotAvailable, match=r"C\+\+ needs a CUDA GPU; rungs 0 to 4 of kernels.rms_norm and"):
        cuda.rms_norm(torch.ones(2, 4), torch.ones(4))


@pytest.mark.skipif(cuda.missing() is not None, reason=f"needs {cuda.missing()}")
def test_the_extension_is_rung_1_on_a_gpu():
    x, weight = torch.randn(5, 1000, device="cuda", dtype=torch.float16), torch.randn(1000, device="cuda").half()
    ours, theirs = cuda.rms_norm(x, weight, 1e-5), ladder_rms_norm(x, weight, 1e-5, rung=1)
    torch.testing.assert_close(ours, theirs, rtol=3e-3, atol=3e-3)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("tiled", [False, True])
def test_the_products_text_is_a_product_where_no_side_is_a_multiple_of_the_tile(tmp_path, tiled):
    text = cuda.source("matmul")
    assert text.count("TILE = 32") == 1  # on the host 16 threads, not 1024
    library = compiled(tmp_path, 16, text.replace("TILE = 32", "TILE = 4") + PRODUCT)
    a, b, c = torch.randn(7, 11), torch.randn(11, 9), torch.full((7, 9), torch.nan)
    library.launch(ctypes.c_bool(tiled), *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)), 7, 11, 9)
    torch.testing.assert_close(c, a @ b)


def test_a_product_refuses_what_its_kernel_would_misread():
    with pytest.raises(SpecError, match=r"\(2, 3\) torch.float32 and \(4, 5\) torch.float32; allowed are \(T, p\)"):
        cuda.matmul(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_what_ptxas_says_of_the_products():
    found = cuda.resources("matmul")
    assert set(found) == {"matmul_naive", "matmul_tiled"}
    assert found["matmul_naive"].shared == 0 and found["matmul_tiled"].shared == 2 * 32 * 32 * 4
    assert all(each.spills == 0 < each.registers for each in found.values())
    assert found["matmul_tiled"].registers <= 32  # two blocks fit on a multiprocessor of an A100


@pytest.mark.skipif(cuda.missing() is not None, reason=f"needs {cuda.missing()}")
@pytest.mark.parametrize("tiled", [False, True])
def test_the_products_extension_is_torchs_product_on_a_gpu(tiled):
    a, b = torch.randn(100, 70, device="cuda"), torch.randn(70, 45, device="cuda")
    torch.testing.assert_close(cuda.matmul(a, b, tiled), a @ b, rtol=1e-4, atol=1e-4)
