"""Any config of transformers: its sizes are those that its authors published."""

import pytest

import llmlab as lab
from llmlab.specs.generic import attentions, auto_class

# What their config.json on the hub has. Gemma 3's leaves out sizes that are its class's defaults.
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
    },
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "tie_word_embeddings": False, "max_position_embeddings": 131072,
}  # fmt: skip
OLMO_2_7B = {
    "model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 100352, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
BERT_BASE = {
    "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip
T5_BASE = {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12,
           "vocab_size": 32128}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "within"),
    [
        (GEMMA_3_4B, 4_300_079_472, 0.005),  # https://huggingface.co/google/gemma-3-4b-it
        (GPT_OSS_20B, 20_914_757_184, 0.001),  # arXiv 2508.10925, table 1: 20.91B
        (OLMO_2_7B, 7_298_617_344, 0.001),  # arXiv 2501.00656
        (BERT_BASE, 110e6, 0.015),  # arXiv 1810.04805, section 3: 110M
        (T5_BASE, 220e6, 0.015),  # arXiv 1910.10683, section 3.1.2
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_parameters_are_those_that_were_published(config, parameters, within):
    assert lab.model(config).parameters == pytest.approx(parameters, rel=within)


def test_a_size_that_the_config_leaves_out_is_the_default_of_its_class():
    spec = lab.model(GEMMA_3_4B)
    assert (spec.vocab, spec.heads, spec.kv_heads, spec.head_dim, spec.layers) == (262_208, 8, 4, 256, 34)


def test_of_a_mixture_a_token_uses_its_experts():
    """The authors' 3.61B count the head but not the embedding (arXiv 2508.10925, table 1)."""
    spec = lab.model(GPT_OSS_20B)
    assert spec.active_parameters - spec.vocab * spec.hidden == pytest.approx(3.61e9, rel=0.005)


def test_which_class_and_which_attention():
    assert auto_class("t5") == "AutoModelForSeq2SeqLM" and auto_class("modernbert") == "AutoModelForMaskedLM"
    assert attentions("gpt_oss") == ("eager", "flash")


def test_an_estimate_says_that_it_counts_a_plain_transformer_and_leaves_a_wider_margin(monkeypatch, tmp_path):
    """Where no trace can be derived, as in a browser."""
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("llmlab.simulation.deriving.find_spec", lambda package: None)
    run = lab.Training(precision="bf16", seq_len=512)
    as_llama = {**OLMO_2_7B, "model_type": "llama"}
    plain, known = (lab.estimate(model, run, "RTX PRO 6000") for model in (OLMO_2_7B, as_llama))
    assert "plain-transformer" in [note.code for note in plain.notes]
    assert "plain-transformer" not in [note.code for note in known.notes]
    assert plain.step_seconds_high > known.step_seconds_high and plain.step_seconds_low < known.step_seconds_low
    assert (plain.outcome, known.outcome) == ("unknown", "fits")
