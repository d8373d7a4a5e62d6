"""The formulas count what PyTorch's FlopCounterMode counts on the real model, to the last FLOP."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import llmlab as lab
from llmlab import Inference, LoRA, Training
from llmlab.archive import figure
from llmlab.formulas.time.flops import approximate, chinchilla_loss, chinchilla_tokens, flops, head_sizes, token_pass
from llmlab.simulation.profile.operator_log import MORE_FLOPS
from llmlab.specs.model import model
from llmlab.step.step import build_step, texts

TINY = {
    "num_hidden_layers": 2, "n_layer": 2, "vocab_size": 512, "hidden_size": 64, "n_embd": 64, "n_head": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 32,
    "head_dim": 16, "n_positions": 64, "n_routed_experts": 4, "num_local_experts": 4, "num_experts": 4,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "qk_head_dim": 32,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = (
    "gpt2", "Llama-3.1-8B", "Mistral-7B-v0.1", "Mixtral-8x7B", "Qwen2.5-0.5B", "Qwen3-30B-A3B", "DeepSeek-V3",
    "Gemma-2-2B", "Phi-3-mini-4k-instruct",
)  # fmt: skip
B = {"micro_batch": 2, "seq_len": 32}
RUNS = (
    Training(**B),
    Training(**B, attention="eager", accumulation=2),
    Training(**B, checkpointing="full"),
    Training(**B, checkpointing="selective", attention="eager"),
    Training(**B, optimizer="adafactor"),
    Inference(batch=2, prompt_len=16, new_tokens=4, weights="fp32", kv="fp32"),
)
TARGETS = (("q_proj", "v_proj"), ("k_proj",), ("o_proj", "down_proj"), ("down_proj",), ("gate_proj",))


def tiny(name, **more):
    config = model(name).config
    config |= {key: size for key, size in TINY.items() if config.get(key) is not None}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:2]
    if name == "DeepSeek-V3":
        config["num_key_value_heads"] = 4
    return config | {"pad_token_id": None} | more


def counted(config, run):
    """FlopCounterMode's count of the real step on this CPU, told of the products it does not know."""
    import bitsandbytes  # noqa: F401  # defines its operators

    known = {}
    for name, formula in MORE_FLOPS.items():
        library, operator = name.split("::")
        known[getattr(getattr(torch.ops, library), operator)] = formula
    spec = model(config)
    step = build_step(spec, run, "cpu", texts(spec, run))
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("run", RUNS, ids=("sdpa", "eager", "full", "selective", "adafactor", "generation"))
def test_formulas_count_what_flop_counter_mode_counts(name, run):
    if name == "Gemma-2-2B" and run.attention != "eager":
        run = type(run)(**{**run.to_dict(), "attention": "eager"})
    config = tiny(name)
    assert flops(model(config), run, cpu=True).total == counted(config, run)


@pytest.mark.parametrize("checkpointing", (None, "full", "selective"))
@pytest.mark.parametrize("attention", ("eager", "sdpa"))
@pytest.mark.parametrize("targets", TARGETS, ids=("q v", "k", "o down", "down", "gate"))
def test_adapters_leave_out_the_gradients_that_nothing_needs(targets, attention, checkpointing):
    run = Training(**B, lora=LoRA(rank=4, targets=targets), attention=attention, checkpointing=checkpointing)
    config = tiny("Llama-3.1-8B")
    assert flops(model(config), run, cpu=True).total == counted(config, run)


@pytest.mark.parametrize("checkpointing", (None, "full"))
def test_packed_weights_count_as_the_product_they_are(checkpointing):
    run = Training(**B, lora=LoRA(rank=4), quantization="nf4", checkpointing=checkpointing)
    config = tiny("Llama-3.1-8B")
    assert flops(model(config), run, cpu=True).total == counted(config, run)


def test_gpt2_costs_what_nanogpt_publishes():
    # nanoGPT counts backward as twice forward, as without fused attention, and pads no vocabulary.
    run = Training(micro_batch=1, seq_len=1024, attention="eager")
    assert flops(model("gpt2"), run).model == figure("gpt2-flops-a-sequence").value


def test_6nd_of_the_82b_run():
    setup = figure("hyperclova-82b-setup")
    assert approximate(setup["parameters"], setup["tokens"]) == 6 * 82 * 10**9 * 150 * 10**9


def test_chinchilla_trained_70b_on_20_tokens_a_parameter():
    assert chinchilla_tokens(70 * 10**9) == 14 * 10**11  # arXiv 2203.15556: 70B on 1.4T tokens


def test_the_law_of_the_loss_would_spend_chinchillas_compute_on_chinchillas_size():
    work = 70e9 * 1.4e12  # parameters times tokens
    sizes = [10e9 * 1.02**k for k in range(200)]
    assert min(sizes, key=lambda size: chinchilla_loss(size, work / size)) == pytest.approx(70e9, rel=0.1)
    assert chinchilla_loss(1e30, 1e30) == pytest.approx(1.8172, abs=1e-4)  # what neither size nor text takes away


def test_full_recomputation_costs_a_third_of_the_blocks():
    run = Training(micro_batch=1, seq_len=2048, checkpointing="full")
    found = flops(model("Llama-3.1-8B"), run)
    assert 0.2 < found.recomputed / found.model < 1 / 3  # 8ND / 6ND is a third; the head and last products are not


def test_experts_cost_what_is_active():
    spec, run = model("Mixtral-8x7B"), Training(micro_batch=1, seq_len=512, attention="eager")
    products = flops(spec, run).model - flops(spec, run).by_part["scores"]
    in_products = spec.active_parameters - spec.vocab * spec.hidden - spec.parameters_by_component["norms"]
    assert products == 6 * in_products * 512


def test_devices_share_the_flops_of_a_step():
    one, eight = (lab.estimate("gpt2", Training(seq_len=128, dp=dp)) for dp in (1, 8))
    assert one.flops == eight.flops  # each does its own sequences
    assert lab.estimate("gpt2", Training(seq_len=128, tp=2)).flops == one.flops // 2


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Mistral-7B-v0.1", "Gemma-2-2B", "DeepSeek-V3"])
@given(prompt=st.integers(1, 30), tokens=st.integers(2, 20), window=st.integers(1, 40))
def test_tokens_decoded_at_once_are_those_decoded_one_by_one(name, prompt, tokens, window):
    """A pass sees one position more than the one before, up to the window, where there is one."""
    spec = model(tiny(name, **({"sliding_window": window} if model(name).sliding_window else {})))

    def decoding(prompt_len: int, new_tokens: int) -> int:
        of_prompt, of_all = (flops(spec, Inference(prompt_len=prompt_len, new_tokens=n)) for n in (1, new_tokens))
        return of_all.total - of_prompt.total

    assert decoding(prompt, tokens) == sum(decoding(prompt + i, 2) for i in range(tokens - 1))
    first, all_of_them = (flops(spec, Inference(prompt_len=prompt, new_tokens=new)) for new in (1, tokens))
    seen = range(prompt + 1, prompt + tokens)
    widest = spec.sliding_window or max(seen)
    positions = sum((spec.layers - spec.window_layers) * n + spec.window_layers * min(n, widest) for n in seen)
    scores = all_of_them.by_part["scores"] - first.by_part["scores"]
    assert scores == 2 * spec.heads * positions * sum(head_sizes(spec))


def test_a_generation_is_the_prompts_pass_and_one_for_each_new_token_but_the_last():
    spec = model("Llama-3.1-8B")
    prompts, whole = (flops(spec, Inference(batch=3, prompt_len=100, new_tokens=n)) for n in (1, 10))
    tokens = [token_pass(spec, 3, context) for context in range(101, 110)]
    assert whole.total == prompts.total + sum(sum(one.values()) for one in tokens)


SIZES = st.integers(1, 4096)


@settings(max_examples=60, deadline=None)
@given(
    micro_batch=SIZES,
    seq_len=SIZES,
    more=st.integers(1, 64),
    checkpointing=st.sampled_from((None, "selective", "full")),
)
def test_longer_sequences_cost_more_than_their_share(micro_batch, seq_len, more, checkpointing):
    run = dict(micro_batch=micro_batch, checkpointing=checkpointing)
    short, long = (flops(model("gpt2"), Training(seq_len=T, **run)) for T in (seq_len, seq_len + more))
    assert long.total * seq_len > short.total * (seq_len + more)
    assert short.total - short.recomputed >= short.model >= approximate(85_000_000, micro_batch * seq_len)
    twice = flops(model("gpt2"), Training(seq_len=seq_len, **{**run, "micro_batch": 2 * micro_batch}))
    assert twice.total == 2 * short.total
