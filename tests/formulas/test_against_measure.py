"""The formulas explain the real step: held to every allocation of the CPU's allocator."""

import pytest

import llmlab as lab

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 344, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip

MIXTRAL = {"model_type": "mixtral", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
           "num_hidden_layers": 3, "intermediate_size": 256, "vocab_size": 2000, "num_local_experts": 4,
           "num_experts_per_tok": 2, "max_position_embeddings": 256}  # fmt: skip

DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
            "num_hidden_layers": 3, "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 8,
            "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
            "vocab_size": 2000, "max_position_embeddings": 256}  # fmt: skip


CONFIGS = {"gpt2": GPT, "llama": LLAMA}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch": 1},
        {"attention": "eager"},
        {"precision": "bf16"},
        {"precision": "autocast-bf16"},
        {"precision": "mixed-bf16", "seq_len": 16},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"checkpointing": "selective", "attention": "eager"},
        {"optimizer": "sgd"},
        {"accumulation": 2},
        {"seq_len": 16, "micro_batch": 1},
    ],
    ids=str,
)
def test_estimate_is_within_three_percent_of_the_measured_cpu_step(family, changes):
    run = lab.Training(**{"micro_batch": 2, "seq_len": 128, **changes})
    measured = lab.measure(CONFIGS[family], run, "cpu", repeats=1)
    estimated = lab.estimate(CONFIGS[family], run, "cpu")
    assert estimated.peak_allocated == pytest.approx(measured.peak_allocated, rel=0.03)
    for phase in ("forward", "backward", "optimizer"):
        assert estimated.phases[phase] == pytest.approx(measured.phases[phase], rel=0.05), phase


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt2", "llama"])
def test_estimate_of_a_generation_is_within_ten_percent_of_the_measured_one(config, attention):
    run = lab.Inference(batch=2, prompt_len=200, new_tokens=4, weights="fp32", kv="fp32", attention=attention)
    measured = lab.measure(config, run, "cpu", repeats=1)
    estimated = lab.estimate(config, run, "cpu")
    assert estimated.peak_allocated == pytest.approx(measured.peak_allocated, rel=0.10)
    assert estimated.phases["decode"] == pytest.approx(measured.phases["decode"], rel=0.10)


@pytest.mark.parametrize("config", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_estimate_of_experts_is_within_ten_percent_of_the_measured_step(config):
    run = lab.Training(micro_batch=2, seq_len=128)
    measured = lab.measure(config, run, "cpu", repeats=1)
    assert lab.estimate(config, run, "cpu").peak_allocated == pytest.approx(measured.peak_allocated, rel=0.10)
