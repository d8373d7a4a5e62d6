"""Kernel times of engines: measured where they were, a roofline elsewhere."""

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.serving import kernels
from llmlab.serving.kernels import engine_kernels, expert_roofline


def test_decoding_reads_the_cache():
    """On an H100 (3.35 TB/s): 256 sequences · heads with 4,096 tokens of 128 channels take 0.16 ms to read at least."""
    table = engine_kernels(lab.gpu("H100"))
    least = 256 * 4096 * 2 * 128 * 2 / 3.35e12
    assert least < table.decode(128, 256, 4096, "bf16") < 1.4 * least
    half = table.decode(128, 256, 4096, "fp8") / table.decode(128, 256, 4096, "bf16")
    assert 0.45 < half < 0.9


def test_a_matmul_of_one_token_reads_its_weights():
    table = engine_kernels(lab.gpu("H100"))
    for dtype, size in (("bf16", 2), ("fp8", 1)):
        least = 8192 * 8192 * size / 3.35e12
        assert least < table.matmul(1, 8192, 8192, dtype) < 1.8 * least
    assert table.matmul(4096, 8192, 8192, "fp8") < 0.7 * table.matmul(4096, 8192, 8192, "bf16")


def test_tokens_after_a_context_take_as_long_as_equally_many_pairs():
    """16 tokens after 8,000: within reading the 32 MB of their keys and values, and a launch, four times over."""
    table = engine_kernels(lab.gpu("H100"))
    assert table.prefill(32, 128, 1024, 0) == table.prefill(32, 128, 1024, 0, 1)
    read = 8000 * 2 * 8 * 128 * 2 / 3.35e12
    assert read < table.prefill(32, 128, 16, 8000) < 4 * (read + kernels.LAUNCH)
    whole = table.prefill(32, 128, 8192, 0)
    chunks = sum(table.prefill(32, 128, 1024, before) for before in range(0, 8192, 1024))
    assert whole < chunks < 1.5 * whole
    assert table.prefill(32, 128, 1024, 0, 8) < 0.3 * whole  # eight prompts do not attend to each other


def test_experts_that_were_not_measured_are_scaled_from_the_nearest():
    table = engine_kernels(lab.gpu("H100"))
    known, near = (4096, 1536, 8, 128, 1, 1), (4096, 1540, 8, 128, 1, 1)
    for tokens in (1, 64, 4096):
        ratio = expert_roofline(table, "bf16", near, tokens) / expert_roofline(table, "bf16", known, tokens)
        found = [table.routed_experts("vllm", "bf16", shape, tokens) for shape in (near, known)]
        assert found[0] == pytest.approx(ratio * found[1])


@pytest.mark.parametrize("name", ["T4", "RTX-4090", "MI300X"])
def test_a_gpu_without_measurements_has_a_roofline(name):
    table, gpu = engine_kernels(lab.gpu(name)), lab.gpu(name)
    assert not table.measured
    assert table.matmul(1, 4096, 4096, "bf16") > 2 * 4096 * 4096 / gpu.bandwidth
    assert table.routed_experts("vllm", "mxfp4", (2880, 2880, 4, 32, 1, 1), 8) > 0
    assert table.latent_attention(128, 8, 1024, 576, "bf16") > 0
    assert table.all_reduce("vllm", 2, 2**20) > 0


def test_a_broken_file_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "MEASURED", tmp_path)
    engine_kernels.cache_clear()
    (tmp_path / "H100-80GB.json").write_text('{"schema": 1, "matmuls": {"fp8": {"axes": [[1]]}}}')
    with pytest.raises(SpecError, match="import_engine_kernels"):
        engine_kernels(lab.gpu("H100"))
    engine_kernels.cache_clear()
