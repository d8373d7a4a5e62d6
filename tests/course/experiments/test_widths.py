"""The recorded sweep over widths is fair and can be repeated, and the rules of µP do what the page says."""

import pytest
import torch

from llmlab.course.experiments.widths import (
    BASE,
    RULES,
    WIDTHS,
    ScaledGPT,
    adamw,
    held_out_loss,
    learn,
    losses,
    noise_scale,
    output_change,
    train,
)

torch.set_num_threads(1)


def test_a_run_can_be_repeated():
    method, width, power, seed = "AdamW, usual", 32, -5, 1
    assert learn(method, width, power, seed).loss == pytest.approx(losses(method)[width][power][seed], rel=0.02)


def test_tables_3_and_8_are_the_same_training():
    found = []
    for rule in ("table 3", "table 8"):
        model = ScaledGPT(64, rule, seed=0)
        train(model, adamw(model), 2**-5, seed=0, stop=30)
        found.append(held_out_loss(model))
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_at_the_base_all_rules_are_the_same():
    assert len({round(output_change(rule, BASE), 4) for rule in RULES}) == 1


def test_an_update_changes_the_outputs_by_as_much_at_every_width_only_under_one_table():
    narrow, wide = min(WIDTHS), max(WIDTHS)
    ratio = {rule: output_change(rule, wide) / output_change(rule, narrow) for rule in RULES}
    assert ratio["usual"] > 2.5 and ratio["mixed"] < 0.4
    assert ratio["table 3"] == pytest.approx(1, abs=0.2)
    assert ratio["table 8"] == pytest.approx(ratio["table 3"], rel=1e-3)


def test_the_noise_scale_grows_during_training():
    model = ScaledGPT(32, "usual", seed=0)
    optimizer, before = adamw(model), noise_scale(model, 16)
    train(model, optimizer, 2**-5, seed=0, stop=50)
    assert noise_scale(model, 16) > 2 * before
