"""Families of transformers that no formula describes: what is simulated is what the real class takes."""

from dataclasses import replace

import pytest
import torch

import llmlab as lab
from llmlab.step.model import build_model, on_meta

TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0}  # fmt: skip
SLIDING = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
BERT = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
BART = {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1,
        "decoder_start_token_id": 2, "max_position_embeddings": 128}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 56, "patch_size": 14}  # fmt: skip
CONFIGS = {
    "gemma3_text": SLIDING,
    "gpt_oss": {**SLIDING, **EXPERTS},
    "olmo2": TEXT,
    "granite": TEXT,
    "smollm3": {**TEXT, "no_rope_layers": [1, 0]},
    "glm4": TEXT,
    "llama4_text": {**TEXT, **EXPERTS, "intermediate_size_mlp": 96, "moe_layers": [1]},
    "qwen3_next": {
        **TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "nemotron_h": {
        **TEXT, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 1,
    },
    "mamba": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "bert": BERT,
    "modernbert": {**BERT, "layer_types": ["full_attention", "sliding_attention"]},
    "t5": {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "bart": BART,
    "whisper": {**BART, "max_source_positions": 64, "num_mel_bins": 80, "eos_token_id": 2, "bos_token_id": 2},
    "gemma3": {"text_config": SLIDING, "vision_config": VISION, "mm_tokens_per_image": 4},
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_on_the_cpu_takes_what_is_simulated(family):
    """To the byte, except for tensors of a few numbers that Python makes on a CPU, such as the states' step counts."""
    config, run = {"model_type": family, **CONFIGS[family]}, lab.Training(micro_batch=2, seq_len=32)
    simulated, measured = lab.simulate(config, run, "cpu"), lab.measure(config, run, "cpu", repeats=1)
    assert simulated.peak_allocated == pytest.approx(measured.peak_allocated, abs=128)
    for phase, size in measured.phases.items():
        if (family, phase) != ("modernbert", "load"):  # its initialization draws into copies
            assert simulated.phases[phase] == pytest.approx(size, abs=128), phase


@pytest.mark.parametrize(
    ("family", "zero"), [("whisper", 0), ("gemma3", 0), ("qwen3_next", 3), ("nemotron_h", 2)]
)  # fmt: skip
def test_two_ranks_share_what_one_gpu_holds(family, zero):
    """DDP adds its buckets, as many bytes as the gradients; FSDP2 leaves each rank half of the parameters. Without
    images a vision tower gets no gradients."""
    config, run = {"model_type": family, **CONFIGS[family]}, lab.Training(micro_batch=2, seq_len=32)
    alone, ranked = (lab.simulate(config, each, "A100-80GB") for each in (run, replace(run, dp=2, zero=zero)))
    weights = 4 * sum(parameter.numel() for parameter in on_meta(lab.model(config), run).parameters())
    load = ranked.phases["load"]
    assert load == pytest.approx(weights / 2 if zero else alone.phases["load"] + weights, rel=0.03)


def test_an_embedding_that_encoder_and_decoder_share_takes_memory_once():
    model = build_model(lab.model({"model_type": "t5", **CONFIGS["t5"]}), lab.Training(seq_len=32), "cpu")
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_bias_that_is_trained_is_not_given_to_cudnn():
    """Autograd has no gradient of cuDNN's bias (tools/autograd/derivatives.yaml); T5's position bias has one."""
    run = lab.Training(seq_len=128, precision="bf16")
    config = {"model_type": "t5", "vocab_size": 512, "d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 1,
              "num_heads": 4}  # fmt: skip
    assert lab.simulate(config, run, "H100-80GB").outcome == "fits"


def test_a_family_of_a_newer_release_is_named_with_the_release(monkeypatch):
    import transformers

    def unknown(**config):
        raise ValueError("Unrecognized model identifier: smollm3. Should contain one of ...")

    monkeypatch.setattr(transformers.AutoConfig, "for_model", unknown)
    with pytest.raises(lab.NotAvailable, match=f"{transformers.__version__} has no model_type='smollm3'"):
        build_model(lab.model({"model_type": "smollm3", **TEXT}), lab.Training(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "blip"}, lab.NotAvailable, "takes pixel_values"),
        ({"model_type": "gemma3_text", **SLIDING, "layer_types": ["no_attention"] * 2}, lab.SpecError, "cannot build"),
        ({"model_type": "bert", **BERT, "num_attention_heads": 5}, lab.SpecError, "cannot build this config of bert"),
    ],
)  # fmt: skip
def test_what_a_class_refuses_is_said_in_a_line(config, error, words):
    with pytest.raises(error, match=words) as raised:
        lab.simulate(config, lab.Training(seq_len=32), "T4")
    assert "\n" not in str(raised.value)


def test_a_step_that_fails_in_the_class_is_said_and_still_estimated(tmp_path, monkeypatch):
    """FNet's Fourier transform does not take bf16."""
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    config, run = {"model_type": "fnet", **BERT}, lab.Training(seq_len=32, precision="bf16")
    with pytest.raises(lab.NotAvailable, match=r"failed in transformers' fnet .*BFloat16"):
        lab.simulate(config, run, "A100-80GB")
    assert "plain-transformer" in [note.code for note in lab.estimate(config, run, "A100-80GB").notes]
