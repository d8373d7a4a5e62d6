"""What a service holds and gives, held to what engines logged and published."""

import json
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.archive import figure
from llmlab.base.errors import SpecError
from llmlab.formulas.serving import ALL_REDUCE, UNPACKING, pass_seconds, serving
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.roofline import decode_pass, prefill_pass, weights_read

LLAMA = "meta-llama/Llama-3.1-8B"
RUN = lab.Inference(prompt_len=1024, new_tokens=256)


def test_the_budget_is_what_vllm_divides() -> None:
    found = serving(LLAMA, RUN, "A100-80GB", fraction=0.9)
    card = lab.gpu("A100-80GB")
    assert found.budget == int(0.9 * card.memory)
    assert found.weights == 2 * lab.model(LLAMA).parameters
    assert found.weights + found.activations + found.other + found.kv_cache == found.budget
    assert found.blocks == found.kv_cache // (16 * 131072)  # Llama-3.1-8B: 128 KiB per token in bf16
    assert found.requests == found.kv_cache // (1280 * 131072)
    assert found.tokens == 16 * found.blocks == pytest.approx(found.kv_cache / 131072, abs=16)


def test_a_pass_takes_what_its_tokens_and_the_logits_of_every_request_take() -> None:
    """By hand: 2 · 4096 + 3 · 14336 bf16 elements a token; logits in bf16 and fp32; cuBLAS' 8.125 MiB."""
    found = serving(LLAMA, RUN, "A100-80GB", read_at_once=2048, max_requests=100)
    assert found.activations == 2048 * 51200 * 2 + 8519680 + 100 * 128256 * (2 + 4)
    assert found.other == 504365056  # the CUDA context's bytes
    assert serving(LLAMA, RUN, "H100-80GB").other == 0  # not known, counts as nothing
    # Where nothing is said: 8192 tokens and 256 requests, as vLLM's LLM class has it on an A100.
    assert serving(LLAMA, RUN, "A100-80GB").activations == 8192 * 51200 * 2 + 8519680 + 256 * 128256 * 6
    told = serving(LLAMA, RUN, "A100-80GB", activations=12345)
    assert told.activations == 12345 and told.blocks > found.blocks


def test_a_request_holds_whole_blocks() -> None:
    """1250 tokens lie in 79 blocks of 16, 14 tokens of the last unused."""
    found = serving(LLAMA, lab.Inference(prompt_len=1000, new_tokens=250), "A100-80GB")
    assert found.requests == found.blocks // 79 < found.tokens // 1250


def test_the_batch_of_the_run_counts_for_nothing() -> None:
    assert serving(LLAMA, replace(RUN, batch=7), "A100-80GB") == serving(LLAMA, RUN, "A100-80GB")


A100_FLOPS, A100_BYTES, NVLINK = 265e12, 1.37e12, 235e9  # /s, as llmlab/hardware/efficiencies.toml and links.toml say
# Llama-3.1-8B: of a layer q and o, k and v, and the MLP's three; the head; a token's keys and values in bf16.
BLOCKS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD, KEYS_AND_VALUES = 4096 * 128256, 2 * 32 * 1024 * 2
READ = 2 * (BLOCKS + HEAD + 65 * 4096)  # and 65 norms; the embedding is looked up


def llama_seconds(card: str = "A100-80GB", **run: object) -> float | None:
    """5 requests, 4096 new tokens among a million pairs, 3000 tokens in the cache: bound by FLOP."""
    return pass_seconds(lab.model(LLAMA), replace(RUN, **run), lab.gpu(card), 4096, 5, 1e6, 3000)


LLAMA_FLOPS = 2 * BLOCKS * 4096 + 2 * HEAD * 5 + 4 * 32 * 4096 * 1e6  # scores and their products with the values


def test_a_pass_of_many_tokens_takes_its_flops() -> None:
    """2 FLOP per weight and token, of the head per sequence; of each pair 2 · 2 · 4096 per layer."""
    assert llama_seconds() == pytest.approx(LLAMA_FLOPS / A100_FLOPS, rel=1e-9)


@pytest.mark.parametrize(("kv", "position"), [("bf16", KEYS_AND_VALUES), ("fp8", KEYS_AND_VALUES // 2)])
def test_a_pass_of_few_tokens_takes_its_bytes(kv: str, position: int) -> None:
    found = pass_seconds(lab.model(LLAMA), replace(RUN, kv=kv), lab.gpu("A100-80GB"), 2, 2, 100_000, 100_000)
    assert found == pytest.approx((READ + 100_000 * position) / A100_BYTES, rel=1e-9)


def test_a_window_bounds_what_a_token_of_a_long_sequence_reads() -> None:
    """Mistral-7B looks back 4096 tokens: on average 4096 of 5001 lie in the cache."""
    spec, run = lab.model("mistralai/Mistral-7B-v0.1"), lab.Inference(prompt_len=5000, new_tokens=1)
    with_cache, without = (pass_seconds(spec, run, lab.gpu("A100-80GB"), 1, 1, 0, held) for held in (50_000, 0))
    assert (with_cache - without) * A100_BYTES == pytest.approx(50_000 * KEYS_AND_VALUES * 4096 / 5001, rel=1e-9)


def test_experts_compute_for_the_tokens_that_go_to_them() -> None:
    """Mixtral: every token through 2 of 8 experts of three matrices (the router's FLOP, a millionth, are left out)."""
    spec = lab.model("mistralai/Mixtral-8x7B-v0.1")
    weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336)
    found = pass_seconds(spec, RUN, lab.gpu("A100-80GB"), 8192, 1, 0, 0)
    assert found == pytest.approx((2 * weights * 8192 + 2 * 4096 * 32000) / A100_FLOPS, rel=2e-4)


@pytest.mark.parametrize("cards", [2, 4, 8])
def test_cards_share_the_work_and_wait_for_two_all_reduces_a_layer(cards: int) -> None:
    """A ring sends 2 (t - 1) / t of the activations, 4096 tokens of 4096 bf16 elements."""
    wait = ALL_REDUCE[cards] + 2 * (cards - 1) / cards * 4096 * 4096 * 2 / NVLINK
    assert llama_seconds(tp=cards) == pytest.approx(LLAMA_FLOPS / A100_FLOPS / cards + 2 * 32 * wait, rel=1e-9)


def test_what_an_all_reduce_waits_and_unpacking_costs_follows_from_the_published_rates() -> None:
    """gpt-fast's Llama-2-7B: the time beyond 1/t over its 64 all-reduces; the share of bf16's GB/s that is left."""
    rates = figure("gpt-fast-tensor-parallel").values
    for cards, seconds in ALL_REDUCE.items():
        beyond = 1 / rates[f"Llama-2-7B, {cards} GPUs"] - 1 / rates["Llama-2-7B, 1 GPU"] / cards
        assert seconds == pytest.approx(beyond / 64, rel=0.005)
    assert pytest.approx({"int8": 1069 / 1397, "nf4": 863 / 1397}, rel=0.002) == UNPACKING


def test_quantized_weights_are_computed_with_in_the_half_precision_that_the_card_has() -> None:
    assert llama_seconds("T4", weights="nf4") == pytest.approx(LLAMA_FLOPS / 19.6e12, rel=1e-9)
    assert llama_seconds("T4", weights="fp32") == pytest.approx(LLAMA_FLOPS / 4.26e12, rel=1e-9)
    assert llama_seconds("T4", weights="bf16") is None  # it has no bf16
    assert llama_seconds("T4", weights="nf4", tp=2) is None  # and no NVLink, under which the waits were measured
    assert llama_seconds("A100-80GB", weights="fp32") is None  # never measured


def test_a_service_says_what_it_knows_in_a_line() -> None:
    found = serving(LLAMA, RUN, "A100-80GB")
    found = replace(found, kv_cache=3 << 30, requests=1234, running=256, tokens_per_second=2500.4)
    cache, speed, price = ("3.00 GiB", "1,234 requests"), ("256", "2,500 tokens/s"), ("$0.26",)
    for known, words, unknown in (
        ({"usd_per_million_tokens": 0.256}, (*cache, *speed, *price), ()),
        ({"usd_per_million_tokens": None}, (*cache, *speed), ("$",)),
        ({"tokens_per_second": None}, cache, ("tokens/s", "$")),
    ):
        line = str(replace(found, **known))
        assert all(word in line for word in words) and not any(word in line for word in unknown)
    full = replace(found, budget=10 << 30, kv_cache=-(2 << 30))
    assert all(words in str(full) for words in ("A100-80GB", "need 12.00 GiB", "of 10.00 GiB"))
    assert "holds" in str(replace(found, kv_cache=1))
    assert "need 10.00 GiB" in str(replace(full, kv_cache=0))


def test_without_a_price_a_service_has_times_and_no_costs() -> None:
    card = replace(lab.gpu("A100-80GB"), usd_per_hour=None)
    found = serving(LLAMA, RUN, card)
    assert found.tokens_per_second and found.usd_per_million_tokens is None
    priced = serving(LLAMA, RUN, "A100-80GB")  # 2.5 dollars per hour in the table
    assert priced.usd_per_million_tokens == pytest.approx(2.5e6 / 3600 / priced.tokens_per_second)


def test_the_smallest_service_is_one_request_of_a_whole_card() -> None:
    found = serving(LLAMA, RUN, "A100-80GB", fraction=1, read_at_once=1, max_requests=1)
    assert found.budget == lab.gpu("A100-80GB").memory
    assert found.running == 1 and found.tokens_per_second > 10


def test_the_cache_has_the_blocks_that_vllm_logged() -> None:
    """Given the bytes that its own profile run took, which only the engine can know."""
    logged = figure("vllm-blocks-llama-3-8b").values
    found = serving(
        "meta-llama/Meta-Llama-3-8B", RUN, "A100-40GB", fraction=0.9, activations=int(logged["profile run, bytes"])
    )
    assert found.weights == pytest.approx(logged["weights, bytes"], rel=0.001)
    assert found.kv_cache == pytest.approx(logged["KV cache, bytes"], rel=0.01)
    assert found.blocks == pytest.approx(logged["blocks"], rel=0.01)


@pytest.mark.parametrize("key", ["gpt-fast-decoding", "gpt-fast-tensor-parallel"])
def test_a_token_takes_what_was_published(key: str) -> None:
    """22 rates on A100s, 1 to 8 of them, dense and experts, 16 to 4 bits: none off by more than 22 %."""
    names = {"Llama-2-7B": "meta-llama/Llama-2-7b-hf", "Llama-2-70B": "meta-llama/Llama-2-70b-hf",
             "Llama-3.1-8B": LLAMA, "Llama-3.1-70B": "meta-llama/Llama-3.1-70B",
             "Mixtral-8x7B": "mistralai/Mixtral-8x7B-v0.1"}  # fmt: skip
    errors = []
    for label, rate in figure(key).values.items():
        name, *rest = label.split(", ")
        weights = {"int8": "int8", "int4": "nf4"}.get(rest[0], "bf16")
        cards = int(rest[0].split()[0]) if key == "gpt-fast-tensor-parallel" else 1
        run = lab.Inference(prompt_len=5, new_tokens=200, weights=weights, tp=cards)
        seconds = pass_seconds(lab.model(names[name]), run, lab.gpu("A100-80GB"), 1, 1, 105, 105)
        errors.append(abs(1 / seconds / rate - 1))
    assert len(errors) >= 5
    assert max(errors) < 0.22
    assert sorted(errors)[len(errors) // 2] < 0.08


def test_what_cannot_hold_the_weights_says_so_and_gives_no_time() -> None:
    found = serving(LLAMA, lab.Inference(weights="fp16", kv="fp16"), "T4")
    assert found.kv_cache < 0 and found.blocks == found.requests == 0
    assert found.first_token is None and found.each_token is None
    assert found.tokens_per_second is None and found.usd_per_million_tokens is None
    assert "leaves nothing" in str(found)
    assert serving(LLAMA, lab.Inference(weights="nf4", kv="fp16"), "T4").requests > 10


def test_a_card_without_measured_rates_gives_memory_and_no_time() -> None:
    found = serving(LLAMA, RUN, "B200")
    assert found.requests > 500 and found.each_token is None and found.tokens_per_second is None
    assert serving(LLAMA, lab.Inference(tp=3), "A100-80GB").tokens_per_second is None  # nobody measured 3


def test_a_token_costs_the_cards_hours_over_the_tokens_of_an_hour() -> None:
    found = serving(LLAMA, RUN, "A100-80GB", usd_per_hour=2.0)
    assert found.running == min(found.requests, 256)
    assert found.tokens_per_second == pytest.approx(found.running / found.each_token)
    assert found.usd_per_million_tokens == pytest.approx(2.0 / (found.tokens_per_second * 3600) * 1e6)
    two = serving(LLAMA, lab.Inference(prompt_len=1024, new_tokens=256, tp=2), "A100-80GB", usd_per_hour=2.0)
    assert two.usd_per_million_tokens > found.usd_per_million_tokens  # twice the cards, not twice the tokens
    assert two.each_token < found.each_token and two.requests > 2 * found.requests


def test_a_token_waits_for_the_prompts_that_are_read_meanwhile() -> None:
    """On average a request is in the middle of its 255 tokens: 1024 + 127.5 lie in the cache."""
    spec, card, run = lab.model(LLAMA), lab.gpu("A100-80GB"), replace(RUN, new_tokens=255)
    found = serving(LLAMA, run, card, max_requests=8)
    prompt = pass_seconds(spec, run, card, 1024, 1, 1024 * 1025 / 2, 0)
    token = pass_seconds(spec, run, card, 8, 8, 8 * 1151.5, 8 * 1151.5)
    assert found.first_token == prompt
    assert found.each_token == pytest.approx(token + 8 * prompt / 255, rel=1e-9)  # each place: a prompt every 255
    short = serving(LLAMA, replace(RUN, prompt_len=2), card)  # its prompt finds nothing in the cache
    assert short.first_token == pytest.approx(READ / A100_BYTES, rel=1e-9)


def test_a_batch_of_experts_reads_nearly_all_of_them() -> None:
    spec, run = lab.model("mistralai/Mixtral-8x7B-v0.1"), lab.Inference()
    embedding = 2 * spec.vocab * spec.hidden
    assert weights_read(spec, run, 1) == pytest.approx(2 * spec.active_parameters - embedding, rel=1e-6)
    assert weights_read(spec, run, 64) == pytest.approx(2 * spec.parameters - embedding, rel=1e-6)
    assert weights_read(spec, run, 1) < weights_read(spec, run, 4) < weights_read(spec, run, 64)


def test_a_small_batch_is_bound_by_reading_and_a_large_one_by_computing() -> None:
    spec, card = lab.model(LLAMA), lab.gpu("A100-80GB")
    one, sixteen, many, twice = (pass_seconds(spec, RUN, card, n, n, 0, 0) for n in (1, 16, 1024, 2048))
    assert one == sixteen
    assert twice == pytest.approx(2 * many)


@pytest.mark.parametrize("options", [{"fraction": 0}, {"fraction": 1.1}, {"read_at_once": 0}, {"max_requests": 0}])
def test_a_service_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(SpecError, match=f"{name}={value}.*give"):
        serving(LLAMA, RUN, "T4", **options)


def test_estimate_sizes_the_service_in_a_note() -> None:
    (note,) = [note for note in lab.estimate(LLAMA, RUN, "A100-80GB").notes if note.code == "serving"]
    found = serving(LLAMA, RUN, "A100-80GB")
    assert f"{found.requests:,} requests" in note and f"{found.tokens_per_second:,.0f} tokens/s" in note
    assert json.loads(lab.estimate(LLAMA, RUN, "A100-80GB").to_json())


def test_an_engine_decodes_latents_as_the_roofline_says_and_expands_those_of_a_prompt() -> None:
    """DeepSeek-V3 with so many requests that FLOP bound the pass; of a prompt half the pairs count, as it
    is causal. The service leaves the routers' products out."""
    spec, card, context = lab.model("deepseek-ai/DeepSeek-V3"), lab.gpu("A100-80GB"), 4096
    rate, run = efficiency(card).matmul["bf16"], lab.Inference(batch=4096, prompt_len=context)
    one = decode_pass(spec, run, context)
    held = run.batch * context
    assert pass_seconds(spec, run, card, run.batch, run.batch, held, held) * rate == pytest.approx(one.flops, rel=0.005)
    prompt = prefill_pass(spec, lab.Inference(prompt_len=context))
    seconds = pass_seconds(spec, run, card, context, 1, context**2 / 2, 0)
    assert seconds * rate == pytest.approx(prompt.products + prompt.scores / 2, rel=0.005)
