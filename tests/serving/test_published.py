"""Steps, loads and memory of Llamas, against figures that others published."""

import re
from dataclasses import replace
from statistics import fmean, median

import pytest

import llmlab as lab
from llmlab.archive import figure
from llmlab.serving.load import simulate
from llmlab.serving.memory import divided_memory
from llmlab.serving.step import Step, step_seconds
from llmlab.specs.model import model

LLAMA = "meta-llama/Llama-3.1-8B"
NAMES = {"Llama-2-7B": "meta-llama/Llama-2-7b-hf", "Llama-2-70B": "meta-llama/Llama-2-70b-hf", "Llama-3.1-8B": LLAMA,
         "Llama-3.1-70B": "meta-llama/Llama-3.1-70B", "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1"}  # fmt: skip


def test_one_user_on_one_to_eight_a100s():
    """gpt-fast's 17 rates in bf16, dense and experts, which it reaches without a server."""
    errors = []
    for label, rate in figure("gpt-fast-tensor-parallel").values.items():
        name, gpus = label.split(", ")
        service = lab.Service(tp=int(gpus.split()[0]))
        step = step_seconds(model(NAMES[name]), service, lab.gpu("A100-80GB"), Step(1, 105))
        errors.append(abs(1 / (sum(step.values()) - step["host"]) / rate - 1))
    assert len(errors) == 17
    assert max(errors) < 0.23
    assert median(errors) < 0.06


def test_loads_on_an_h100():
    """TensorRT-LLM in bf16 on one H100: means, TPOT within 5 %; the TTFT lies between that of users whose lengths are
    drawn, so that they come one by one, and that of equal lengths, which keep them together."""
    known, spec, card = figure("llama-3.1-8b-h100-trtllm"), model(LLAMA), lab.gpu("H100")
    for label in known.values:
        load, what = label.split(": ")
        prompt, answer, users = map(int, re.findall(r"\d+", load))
        service = lab.Service("trtllm", prompt_len=prompt, output_len=answer, concurrency=users, range_ratio=0.8)
        memory = divided_memory(spec, service, card)
        drawn, equal = (simulate(spec, replace(service, range_ratio=ratio), card, memory) for ratio in (0.8, 1.0))
        if what == "TPOT":
            assert fmean(one.each_token for one in drawn) == pytest.approx(known[label], rel=0.05)
        else:
            low, high = (fmean(one.first_token for one in served) for served in (drawn, equal))
            assert low < known[label] < high


def test_the_memory_of_llama_8b_is_what_vllm_logged():
    log = figure("vllm-memory-llama-3.1-8b")
    h100 = replace(lab.gpu("H100"), memory=int(79.18 * 2**30))
    found = divided_memory(model(LLAMA), lab.Service(gpu_memory_utilization=0.9, max_model_len=16_000), h100)
    assert found.weights == pytest.approx(log["weights, bytes"], rel=0.003)
    assert found.activations == pytest.approx(log["activation peak, bytes"], rel=0.01)
    assert found.cache == pytest.approx(log["KV cache, bytes"], rel=0.01)


def test_the_cache_of_an_old_version_with_the_peak_that_it_logged():
    """Its profiling run took 9.4 GiB, eight times what 8,192 tokens and 256 requests account for."""
    log = figure("vllm-blocks-llama-3-8b")
    old = lab.Service(gpu_memory_utilization=0.9, max_num_seqs=256, max_num_batched_tokens=8192)
    found = divided_memory(model("meta-llama/Meta-Llama-3-8B"), old, lab.gpu("A100-40GB"))
    assert found.cache > 1.5 * log["KV cache, bytes"]
    with_their_peak = found.cache + found.activations - log["profile run, bytes"]
    assert with_their_peak == pytest.approx(log["KV cache, bytes"], rel=0.03)
