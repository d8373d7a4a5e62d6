"""What chapters 20 and 21 derive by hand, and claim."""

import pytest

import llmlab as lab
from llmlab.formulas.time.efficiency import efficiency
from llmlab.serving.step import Step, step_seconds

MODEL = "meta-llama/Llama-3.1-8B"


def seconds(step):
    return sum(step_seconds(lab.model(MODEL), lab.Service(), lab.gpu("A100-80GB"), step).values())


def test_vllms_steps_are_a_little_longer_than_the_bound():
    rates, spec = efficiency("A100-80GB"), lab.model(MODEL)
    multiplied = spec.parameters - spec.vocab * spec.hidden
    cache = 4 * spec.layers * spec.kv_heads * spec.head_dim * 1024
    prefill, decode = 2 * multiplied * 1024 / rates.matmul["bf16"], (2 * multiplied + cache) / rates.bandwidth
    for step, bound in ((Step(0, 0, 1024), prefill), (Step(1, 1024), decode)):
        assert 1.1 * bound < seconds(step) < 1.25 * bound
    assert seconds(Step(0, 0, 1024)) == pytest.approx(5 * seconds(Step(1, 1024)), rel=0.1)
    assert seconds(Step(64, 1024)) < 1.7 * seconds(Step(1, 1024))


def users(gpu, **options):
    service = lab.Service(prompt_len=7936, output_len=256, max_model_len=8192, **options)
    return lab.serve(MODEL, service, gpu).memory


def test_users_that_fit_on_an_a100():
    spec, memory = lab.model(MODEL), users("A100-80GB")
    by_hand = 0.92 * lab.gpu("A100-80GB").memory - 2 * spec.parameters - 256 * spec.vocab * 38.5
    assert by_hand - memory.outside - memory.graphs == pytest.approx(memory.cache, rel=1e-3)
    assert memory.requests == 56


@pytest.mark.parametrize(("gpu", "plain", "weights", "cache"), [("A100-40GB", 19, 29, 39), ("RTX-4090", 5, 14, 10),
                                                               ("A100-80GB", 56, 66, 112)])  # fmt: skip
def test_the_cache_is_worth_halving_where_its_room_is_more_than_the_weights_save(gpu, plain, weights, cache):
    base = users(gpu)
    saved = base.weights - users(gpu, weights="awq").weights
    found = base.requests, users(gpu, weights="awq").requests, users(gpu, kv="fp8").requests
    assert found == (plain, weights, cache)
    assert (cache > weights) == (base.cache > saved)
