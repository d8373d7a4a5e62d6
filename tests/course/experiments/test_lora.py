"""The recorded fine-tuning runs are fair and can be repeated, and they show what the page says."""

import json
import sys

import pytest
import torch

from llmlab.course.architectures.small import small_model
from llmlab.course.experiments.lora import (
    ALL,
    KEPT,
    METHODS,
    RESULTS,
    SEEDS,
    best_rate,
    directions,
    final_losses,
    learn,
    losses_before,
    prepare,
    results,
    rounded,
    rounded_model,
    texts,
    with_directions,
)
from llmlab.course.techniques.lora import trained_parameters

torch.set_num_threads(1)
HEADER = json.loads(RESULTS.read_text(encoding="utf-8"))


def mean(method, kind=0):
    losses = [pair[kind] for pair in final_losses(method)[best_rate(method)]]
    return sum(losses) / len(losses)


@pytest.mark.skipif(HEADER["python"] != sys.version.split()[0], reason="the text is the library of another Python")
def test_a_run_can_be_repeated():
    assert [len(ids) for ids in texts()] == HEADER["tokens"]
    _, (first,) = learn("rank 16", best_rate("rank 16"), seed=0, steps=50)
    (recorded,) = [r for r in results() if r[:4] == first[:4]]
    assert first[4:] == pytest.approx(recorded[4:], rel=0.02)


def test_training_all_weights_forgets_by_its_rate():
    losses = {rate: pairs[0] for rate, pairs in final_losses("all weights").items()}
    (low, _), (high, _) = losses[3e-4], losses[1e-3]
    assert abs(high - low) < 0.05 and losses[1e-3][1] - losses[3e-4][1] > 0.4


def test_lora_learns_less_and_its_best_rate_is_about_ten_times_as_high():
    assert mean("all weights") < mean("linear weights") < mean("rank 16") < mean("rank 1") < losses_before()[0]
    assert best_rate("rank 16") == pytest.approx(10 * best_rate("all weights"))


def test_few_directions_of_a_full_update_lose_much_of_it():
    means = [sum(code for code, _ in directions()[rank]) / len(SEEDS) for rank in KEPT]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(mean("linear weights"), abs=0.005)


def test_training_on_rounded_weights_ends_close_and_merging_into_nf4_costs_more():
    losses = {name: sum(values) / len(values) for name, values in rounded().items()}
    assert losses["trained on the base in NF4"] == pytest.approx(losses["merged into fp32"], abs=0.002)
    assert losses["merged into NF4"] > losses["merged into fp32"]
    assert losses["trained on the base in NF4"] == pytest.approx(mean("rank 16"), abs=0.05)


@pytest.mark.parametrize("method", [name for name in METHODS if "only" in name])
def test_other_targets_train_about_as_many_parameters_as_rank_16(method):
    counts = [trained_parameters(prepare(name, small_model())) for name in (method, "rank 16")]
    assert counts[0] == pytest.approx(counts[1], rel=0.02)


def test_linear_weights_are_those_that_get_adapters():
    names = {name for name, w in prepare("linear weights", small_model()).named_parameters() if w.requires_grad}
    assert names == {name for name, _ in small_model().named_parameters() if name.split(".")[-2] in ALL}


def test_all_directions_are_the_whole_update():
    model = rounded_model()
    for name, weight in with_directions(model, 256).named_parameters():
        assert torch.allclose(weight, model.get_parameter(name), atol=1e-4)
