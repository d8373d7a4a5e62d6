"""What a service holds and gives, held to what engines logged and published."""

import json

import pytest

import llmlab as lab
from llmlab.errors import SpecError
from llmlab.estimate.roofline import weights_read
from llmlab.estimate.serving import pass_seconds, serving
from llmlab.records import figure

LLAMA = "meta-llama/Llama-3.1-8B"
RUN = lab.Inference(prompt_len=1024, new_tokens=256)


def test_the_budget_is_what_vllm_divides() -> None:
    found = serving(LLAMA, RUN, "A100-80GB", fraction=0.9)
    card = lab.gpu("A100-80GB")
    assert found.budget == int(0.9 * card.memory)
    assert found.weights == 2 * lab.model(LLAMA).parameters
    assert found.weights + found.activations + found.other + found.kv_cache == found.budget
    assert found.blocks == found.kv_cache // (16 * 131072)  # Llama-3.1-8B: 128 KiB a token in bf16
    assert found.requests == found.kv_cache // (1280 * 131072)


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
    assert found.tokens_per_second is None and found.usd_per_million_tokens is None
    assert "nothing is left" in str(found)
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
    spec, card, found = lab.model(LLAMA), lab.gpu("A100-80GB"), serving(LLAMA, RUN, "A100-80GB", max_requests=8)
    prompt = pass_seconds(spec, RUN, card, 1024, 1, 1024 * 1025 / 2, 0)
    token = pass_seconds(spec, RUN, card, 8, 8, 8 * 1152, 8 * 1152)
    assert found.first_token == prompt
    assert found.each_token == pytest.approx(token + 8 * prompt / 256)  # each of 8 places: a prompt every 256 tokens


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
    with pytest.raises(SpecError, match="give"):
        serving(LLAMA, RUN, "T4", **options)


def test_estimate_sizes_the_service_in_a_note() -> None:
    notes = " ".join(lab.estimate(LLAMA, RUN, "A100-80GB").notes)
    found = serving(LLAMA, RUN, "A100-80GB")
    assert f"{found.requests:,} requests" in notes and f"{found.tokens_per_second:,.0f} tokens/s" in notes
    assert json.loads(lab.estimate(LLAMA, RUN, "A100-80GB").to_json())
