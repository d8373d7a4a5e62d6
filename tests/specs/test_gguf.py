"""Bits per weight as the gguf package counts them, and files of published size."""

import gguf as package
import pytest

import llmlab as lab
from llmlab.base.errors import SpecError, UnknownName
from llmlab.specs.gguf import BLOCKS, MIXES, bits_per_weight, file_bytes, stored

# Bytes of the published files of Llama-3.1-8B-Instruct, bartowski/Meta-Llama-3.1-8B-Instruct-GGUF on Hugging Face
PUBLISHED = {
    "F32": 32128885888, "Q8_0": 8540775840, "Q6_K": 6596011424, "Q5_K_M": 5732992416, "Q5_K_S": 5599298976,
    "Q4_K_M": 4920739232, "Q4_K_S": 4692673952, "IQ4_NL": 4677993888, "IQ4_XS": 4447667616, "Q3_K_L": 4321961376,
    "Q3_K_M": 4018922912, "Q3_K_S": 3664504224, "IQ3_M": 3784828320, "IQ3_XS": 3518752160, "Q2_K": 3179136416,
    "IQ2_M": 2948285856,
}  # fmt: skip
# Files of other models there: bartowski's of Mistral, Gemma and SmolLM2, unsloth's of Qwen3, Qwen's of Qwen2.5, and
# ggml-org's of gpt-oss. A tokenizer without merges has a smaller header than ours.
OTHERS = {
    "mistralai/Mistral-7B-v0.3": {
        "IQ1_S": 1615319264, "IQ1_M": 1757663456, "IQ2_XXS": 1994903776, "IQ2_XS": 2201473248, "IQ2_S": 2314457312,
        "IQ2_M": 2504249568, "IQ3_XXS": 2830880992, "IQ3_XS": 3022770400, "IQ3_S": 3186348256, "IQ3_M": 3288846560,
        "IQ4_XS": 3911962848,
    },
    "Qwen/Qwen3-30B-A3B": {
        "Q2_K": 11258610240, "Q3_K_S": 13292468800, "Q3_K_M": 14711847488, "IQ4_NL": 17310782016, "Q4_1": 19192500800,
        "Q4_K_S": 17456009792, "Q4_K_M": 18556686912, "Q5_K_M": 21725581888, "Q6_K": 25092532800, "Q8_0": 32483932736,
        "BF16": 61095803424,
    },
    "openai/gpt-oss-20b": {"MXFP4_MOE": 12109566624},
    "openai/gpt-oss-120b": {"MXFP4_MOE": 63387346208},
    "Qwen/Qwen2.5-7B": {"Q2_K": 3015940000, "Q3_K_M": 3808391072, "Q4_K_M": 4683073632},
    "Qwen/Qwen3-32B": {"IQ4_XS": 17714805408, "Q2_K": 12344652448, "Q4_K_M": 19762150048},
    "google/gemma-2-2b": {"IQ3_M": 1393561440, "IQ4_XS": 1566250848, "Q4_K_M": 1708582752},
    "google/gemma-3-4b-pt": {"Q4_K_M": 2489757856, "Q8_0": 4130226336},
    "HuggingFaceTB/SmolLM2-1.7B": {"IQ3_XS": 739070944, "IQ4_XS": 940397536, "Q2_K": 674583520},
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_ggmls(kind):
    assert package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]] == BLOCKS[kind]


@pytest.mark.parametrize("mix", PUBLISHED)
def test_file_sizes_are_the_published_ones(mix):
    """Within 0.001 %, though the header is an estimate; of the tensors alone, to the byte (see the next test)."""
    assert file_bytes(lab.model("Llama-3.1-8B"), mix) == pytest.approx(PUBLISHED[mix], rel=1e-5)


@pytest.mark.parametrize(("name", "mix"), [(name, mix) for name, files in OTHERS.items() for mix in files])
def test_file_sizes_of_other_models_are_the_published_ones(name, mix):
    assert file_bytes(lab.model(name), mix) == pytest.approx(OTHERS[name][mix], rel=0.008)


def test_all_published_files_have_the_same_header():
    """What the rules leave unexplained is the tokenizer, the same in every file: no tensor's kind is wrong."""
    spec = lab.model("Llama-3.1-8B")
    headers = {mix: PUBLISHED[mix] - file_bytes(spec, mix, header=0) for mix in PUBLISHED}
    assert headers.pop("F32") == 7840640
    assert set(headers.values()) == {7840928}, "288 bytes more: what quantizing adds to the metadata"


@pytest.mark.parametrize(("mix", "bits"), [("F16", 16.0005), ("Q8_0", 8.5008), ("Q6_K", 6.5633), ("Q4_K_M", 4.8944)])
def test_bits_a_weight_are_llama_cpps_own_table(mix, bits):
    spec = lab.model("Llama-3.1-8B")
    assert 8 * file_bytes(spec, mix, header=0) / spec.parameters == pytest.approx(bits, abs=5e-5)


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "Qwen2.5-0.5B", "gemma-2-2b", "DeepSeek-V3"])
@pytest.mark.parametrize("mix", MIXES)
def test_every_parameter_is_stored_once_in_whole_blocks(name, mix):
    spec = lab.model(name)
    tensors = list(stored(spec, mix))
    extra = sum(t.rows * t.columns for t in tensors if t.name == "rope_freqs")
    assert sum(t.rows * t.columns for t in tensors) - extra == spec.parameters
    assert all(t.columns % BLOCKS[t.kind][0] == 0 for t in tensors)


def test_rows_that_are_no_superblocks_fall_back():
    """Qwen2.5-0.5B is 896 wide, no multiple of 256: its Q4_K becomes Q5_0, its file larger than the name says."""
    spec = lab.model("Qwen2.5-0.5B")
    for mix, kind in (("Q2_K", "Q4_0"), ("Q3_K_S", "Q4_0"), ("Q4_K_S", "Q5_0"), ("Q5_K_S", "Q5_1"), ("Q6_K", "Q8_0")):
        assert {tensor.name: tensor.kind for tensor in stored(spec, mix)}["blk.5.attn_q"] == kind
    kinds = {tensor.name: tensor.kind for tensor in stored(spec, "Q4_K_M")}
    assert kinds["blk.5.attn_q"] == "Q5_0" and kinds["blk.0.ffn_down"] == "Q6_K" and kinds["output"] == "Q8_0"


def test_sizes_refuse_what_they_do_not_know():
    with pytest.raises(UnknownName, match="Q4_K_M"):
        file_bytes(lab.model("gpt2"), "Q4_K_XL")
    with pytest.raises(UnknownName, match="nf4"):
        bits_per_weight("nf5")
    with pytest.raises(SpecError, match="other layers than attention"):
        file_bytes(lab.model("Qwen/Qwen3-Next-80B-A3B-Instruct"), "Q4_K_M")


def test_the_estimators_bytes_of_nf4_and_int8_are_these_bits():
    from llmlab.formulas.memory.precision import weight_bytes

    for kind in ("nf4", "int8"):
        assert 8 * weight_bytes(kind, 2**20, rows=0) / 2**20 == bits_per_weight(kind)
