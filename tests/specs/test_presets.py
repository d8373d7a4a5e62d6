"""The presets: published totals, names, what each family is."""

import json
import subprocess
import sys

import pytest

from llmlab.formulas.report import estimated
from llmlab.specs.model import model
from llmlab.specs.run import Training
from llmlab.step.model import on_meta

# As the Hugging Face pages (safetensors metadata) or the papers give them.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "huggyllama/llama-7b": 6_738_415_616,
    "huggyllama/llama-13b": 13_015_864_320,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Coder-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200 - 58 * 256,  # biases of the routers, which are buffers
    "deepseek-ai/deepseek-coder-1.3b-base": 1_346_471_936,
}
# The same, for the class that transformers builds. A checkpoint may hold more: layers that predict further tokens
# (Qwen3-Next, Qwen3.5, GLM-4.5), for which the source of the number without them is named, and router biases.
BUILT = {
    "google-bert/bert-base-uncased": 110e6,  # arXiv 1810.04805, section 3
    "answerdotai/ModernBERT-base": 149_655_232,
    "answerdotai/ModernBERT-large": 395_881_664,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "google/gemma-3-4b-pt": 4_300_079_472,
    "google/gemma-3-12b-pt": 12_187_325_040,
    "google/gemma-3-27b-pt": 417e6 + 1416e6 + 25_600e6,  # arXiv 2503.19786, table 1
    "zai-org/GLM-4.5-Air": 106_852_251_264,  # PrimeIntellect/INTELLECT-3, trained from it
    "zai-org/GLM-4.5": 352_797_829_024,  # Fireworks AI's list of models; with the further layer 358e9
    "openai/gpt-oss-20b": 20.91e9,  # arXiv 2508.10925, table 1
    "openai/gpt-oss-120b": 116.83e9,  # the same
    "ibm-granite/granite-4.0-micro": 3_402_836_480,
    "ibm-granite/granite-4.0-h-micro": 3_191_396_096,
    "ibm-granite/granite-4.0-h-tiny": 6_939_037_248,
    "ibm-granite/granite-4.0-h-small": 32_207_337_984,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108_641_793_536,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400e9,  # the model card
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "nvidia/Nemotron-H-8B-Base-8K": 8.1e9,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/Olmo-3-1025-7B": 7_298_011_136,
    "allenai/Olmo-3-1125-32B": 32_233_522_176,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,  # Qwen3-Coder-Next, which has the same sizes
    "Qwen/Qwen3.5-9B": 9_409_813_744,  # KerasHub, models/qwen3_5/qwen3_5_presets.py
    "Qwen/Qwen3.5-27B": 27_356_728_560,  # the same
    "Qwen/Qwen3.5-35B-A3B": 35_107_181_936,  # KerasHub, models/qwen3_5_moe/qwen3_5_moe_presets.py
    "Qwen/Qwen3.5-397B-A17B": 397e9,
    "zai-org/GLM-5": 744e9,
    "MiniMaxAI/MiniMax-M2.5": 229e9,
    "moonshotai/Kimi-K2-Instruct": 1.03e12,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480e9,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "google-t5/t5-base": 222_903_552,
    "openai/whisper-small": 241_734_912,
    "openai/whisper-large-v3": 1_543_490_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_total(name):
    assert model(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", BUILT)
def test_the_class_has_the_published_total_and_so_has_the_preset(name):
    spec = model(name)
    built = sum(parameter.numel() for parameter in on_meta(spec, Training(attention="eager")).parameters())
    assert built == spec.parameters == sum(spec.parameters_by_component.values())
    assert built == pytest.approx(BUILT[name], rel=0.005)


@pytest.mark.parametrize("name", BUILT)
def test_an_estimate_of_a_preset_answers_without_its_class(name):
    """As in a browser: the formulas of its family, or those of a plain transformer."""
    run = Training(micro_batch=1, seq_len=min(512, model(name).max_positions), precision="bf16")
    report = estimated(model(name), run, "H100")
    assert report.peak_allocated > 8 * model(name).parameters  # weights, gradients and two moments in bf16
    assert report.step_seconds > 0


def test_kv_cache_elements():
    assert model("Llama-2-7b").kv_elements_per_token == 2 * 4096 * 32  # every head has its own keys and values
    assert model("Llama-3.1-8B").kv_elements_per_token == 2 * 1024 * 32  # 8 of 32 heads
    assert model("Llama-2-70b").kv_elements_per_token * 2 == 327_680  # 320 KiB per token in bf16
    assert model("DeepSeek-V3").kv_elements_per_token == (512 + 64) * 61


def test_gemma_and_mistral_windows():
    gemma, mistral = model("gemma-2-9b"), model("Mistral-7B-v0.1")
    assert (gemma.sliding_window, gemma.window_layers) == (4096, 21)  # every second of 42
    assert (mistral.sliding_window, mistral.window_layers) == (4096, 32)
    assert model("Mistral-7B-v0.3").sliding_window is None
    assert (gemma.norms_per_layer, gemma.attention_softcap, gemma.logit_softcap) == (4, 50.0, 30.0)


def test_no_two_presets_share_a_name():
    from llmlab.specs.model import _presets

    meanings: dict[str, set[str]] = {}
    for name, preset in _presets().items():
        assert "/" in preset["source"]
        for spelling in (name, *preset["aliases"]):
            meanings.setdefault(spelling.lower(), set()).add(name)
            meanings.setdefault(spelling.rpartition("/")[2].lower(), set()).add(name)
    assert {spelling: names for spelling, names in meanings.items() if len(names) > 1} == {}


def test_a_config_may_be_changed_without_changing_the_spec():
    spec = model("Llama-3.1-8B")
    spec.config["rope_scaling"]["factor"] = 1.0
    assert spec.config["rope_scaling"]["factor"] == 8.0
    assert json.loads(json.dumps(spec.config)) == spec.config


def test_presets_load_without_torch_or_transformers():
    code = (
        "import sys; from llmlab.specs.model import model; print(model('gpt2').parameters);"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split("\n")[:2] == ["124439808", "[]"]
