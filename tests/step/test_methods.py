"""Training methods: their losses, what they keep in memory, and that estimate and simulate agree on it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.cli.main import cli
from llmlab.step.methods import _distillation, loss_of
from llmlab.step.step import build_step, texts, training_step

TINY = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": True}  # fmt: skip
GPU, GENERATED = "A100-80GB", {"completion_len": 256, "generations": 4, "micro_batch": 4}
METHODS = {
    "dpo": {}, "orpo": {}, "kto": {}, "distill": {}, "grpo": GENERATED, "ppo": GENERATED,
}  # fmt: skip


def run_of(method, **fields):
    return lab.Training(**{"method": method, "micro_batch": 4, "seq_len": 512, "precision": "bf16", **fields})


@pytest.mark.parametrize("method", METHODS)
def test_estimate_has_the_peak_the_flop_and_the_time_of_simulate(method, agree):
    run = run_of(method, **METHODS[method])
    estimate, simulation = agree(TINY, run, GPU, 0.03)
    assert estimate.flops == pytest.approx(simulation.flops, rel=0.002)
    assert estimate.time["attention"] == pytest.approx(simulation.time["attention"], rel=0.02)


@pytest.mark.parametrize("fields", [{"checkpointing": "full", "lora": lab.LoRA()}, {"precision": "autocast-bf16"}])
def test_estimate_has_the_peak_of_simulate_with_adapters_and_under_autocast(fields):
    run = run_of("dpo", **fields)
    peaks = [verb(TINY, run, GPU).peak_allocated for verb in (lab.estimate, lab.simulate)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.03)


def test_a_pair_is_two_sequences_and_a_reference_model_one_more_forward_pass():
    plain = lab.estimate(TINY, run_of("sft", micro_batch=8), GPU)
    pairs = lab.estimate(TINY, run_of("dpo", reference="precomputed"), GPU)
    kept = lab.estimate(TINY, run_of("dpo"), GPU)
    weights = 2 * lab.model(TINY).parameters
    assert kept.phases["optimizer"] - pairs.phases["optimizer"] == weights
    assert kept.time["attention"] / pairs.time["attention"] == pytest.approx(1 + 1 / 3, rel=0.1)
    head = 2 * 8 * 512 * 512 * 8192  # backward makes the logits again
    assert pairs.flops - plain.flops == head


def test_an_adapter_that_is_switched_off_takes_no_memory_for_the_reference_model():
    adapters = run_of("dpo", lora=lab.LoRA())
    off, before = (lab.estimate(TINY, replace(adapters, reference=each), GPU) for each in ("adapter", "precomputed"))
    assert off.peak_allocated == before.peak_allocated
    assert off.step_seconds > before.step_seconds


def test_an_offloaded_reference_model_is_on_the_gpu_for_its_pass_alone():
    kept, offloaded = (lab.simulate(TINY, run_of("dpo", reference=each), GPU) for each in ("kept", "offloaded"))
    weights = kept.parts["weights"] - offloaded.parts["weights"]
    assert weights == pytest.approx(2 * lab.model(TINY).parameters, rel=0.05)  # the allocator's rounding
    times = [lab.estimate(TINY, run_of("dpo", reference=each), GPU).time for each in ("kept", "offloaded")]
    assert times[1]["elementwise"] > times[0]["elementwise"]  # over PCIe


def losses(monkeypatch, run):
    """Return the loss of a step on the CPU, whose model is its own reference."""
    spec = lab.model({**TINY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500})
    torch.manual_seed(0)
    step, found = build_step(spec, run, "cpu", texts(spec, run)), []
    backward = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: (found.append(loss.item()), backward(loss)))
    training_step(step)
    return found


def test_a_policy_that_is_its_reference_has_the_losses_of_a_coin_toss(monkeypatch):
    fresh = {"lora": lab.LoRA(), "precision": "fp32", "seq_len": 32}  # whose adapters add nothing yet
    assert losses(monkeypatch, run_of("dpo", **fresh)) == pytest.approx([math.log(2)])
    assert losses(monkeypatch, run_of("kto", **fresh)) == pytest.approx([0.5])
    grpo = run_of("grpo", **fresh, completion_len=8, generations=4, reference="adapter")
    assert losses(monkeypatch, grpo) == pytest.approx([-1.0])  # the advantage, and no divergence


@pytest.mark.parametrize("fields", [
    {"method": "orpo", "reference": "kept"}, {"method": "dpo", "reference": "adapter"}, {"method": "dpo", "tp": 2},
    {"method": "grpo"}, {"method": "grpo", "completion_len": 1024, "seq_len": 1024}, {"teacher": "gpt2"},
    {"method": "grpo", "completion_len": 8, "mean_completion_len": 9}, {"method": "dpo", "mean_completion_len": 8},
    {"method": "grpo", "completion_len": 8, "mean_completion_len": 0},
    {"method": "grpo", "completion_len": 8, "micro_batch": 3}, {"method": "dpo", "stack": "torchtitan"},
])  # fmt: skip
def test_options_that_a_method_does_not_have_are_refused(fields):
    with pytest.raises(SpecError):
        lab.Training(**fields)


def test_plan_and_fix_refuse_what_they_do_not_know_by_name():
    with pytest.raises(SpecError, match="method='dpo'"):
        lab.plan("gpt2", "T4", 8, fixed={"method": "dpo"})
    with pytest.raises(SpecError, match="method='grpo'"):
        lab.fix(TINY, run_of("grpo", **GENERATED), GPU)


def test_the_command_line_takes_a_method():
    result = CliRunner().invoke(cli, ["estimate", "gpt2", "--gpu", "T4", "--method", "dpo", "--json"])
    assert '"method": "dpo"' in result.output and result.exit_code == 0
    words = ["--method", "grpo", "--completion-len", "8", "--mean-completion-len", "4", "--generations", "1", "--json"]
    assert '"mean_completion_len": 4' in CliRunner().invoke(cli, ["estimate", "gpt2", "--gpu", "T4", *words]).output


def test_distillation_is_the_divergence_to_the_teacher_at_each_token_but_the_last():
    torch.manual_seed(0)
    logits = {name: torch.randn(2, 5, 7) for name in ("trained", "teacher")}
    models = {name: lambda name=name, **_: SimpleNamespace(logits=logits[name]) for name in logits}
    loss, _ = _distillation(run_of("distill"), models, torch.zeros(2, 5, dtype=torch.long))
    student, teacher = (logits[name][:, :-1].reshape(8, 7).log_softmax(-1) for name in ("trained", "teacher"))
    assert loss.item() == pytest.approx((teacher.exp() * (teacher - student)).sum(-1).mean().item())


# Two chosen and two rejected sequences, and the sums of their log-probabilities.
PAIRS = torch.arange(4).unsqueeze(1)


def scored(*sums):
    return lambda input_ids, **_: torch.tensor(sums)[input_ids[:, 0]].unsqueeze(1)


@pytest.mark.parametrize(("method", "expected"), [
    ("dpo", lambda s: -(math.log(s(0.1 * (1 - 2))) + math.log(s(0.1 * (0 - 1)))) / 2),
    ("kto", lambda s: 1 - (s(-0.1 * (1 - 1)) + s(0.1 * (0 - 1)) + s(-0.1 * (2 - 1)) + s(0.1 * (1 - 1))) / 4),
])  # fmt: skip
def test_losses_of_preferences_are_those_of_their_papers(method, expected):
    """arXiv 2305.18290, equation 7, and 2402.01306, equation 8: log-ratios of 1, 0, 2 and 1, whose mean is 1."""
    models = {"trained": scored(-1.0, -2.0, -1.0, -2.0), "reference": scored(-2.0, -2.0, -3.0, -3.0)}
    loss, _ = loss_of(run_of(method), models, PAIRS)
    assert loss.item() == pytest.approx(expected(lambda x: 1 / (1 + math.exp(-x))))


def test_a_reward_models_loss_is_bradley_terrys():
    logits = torch.tensor([[2.0], [1.0], [-1.0], [1.0]])
    loss, _ = loss_of(run_of("reward"), {"trained": lambda **_: SimpleNamespace(logits=logits)}, PAIRS)
    assert loss.item() == pytest.approx((math.log1p(math.exp(-3)) + math.log(2)) / 2)


def test_odds_ratios_are_of_mean_log_probabilities():
    """ORPO: the likelihood of the chosen and -0.1 log sigmoid of log odds; with equal logits each token has 1 / V."""
    models = {"trained": lambda input_ids, **_: SimpleNamespace(logits=torch.zeros(*input_ids.shape, 10))}
    loss, logits = loss_of(run_of("orpo"), models, torch.zeros(4, 6, dtype=torch.long))
    assert loss.item() == pytest.approx(math.log(10) + 0.1 * math.log(2)) and logits.shape == (4, 6, 10)
    likely = torch.zeros(4, 6, 2)
    likely[:2, :, 0], likely[2:, :, 1] = math.log(3), math.log(3)  # the chosen have 3/4, the rejected 1/4
    loss, _ = loss_of(run_of("orpo"), {"trained": lambda **_: SimpleNamespace(logits=likely)},
                      torch.zeros(4, 6, dtype=torch.long))  # fmt: skip
    assert loss.item() == pytest.approx(math.log(4 / 3) + 0.1 * math.log1p(1 / 9))  # odds of 3 over 1/3


@pytest.mark.parametrize(("ratio", "clipped"), [(1.5, 1.2), (1.1, 1.1), (0.5, 0.5)])
def test_ppo_clips_a_policy_that_has_moved_up_and_adds_a_tenth_of_the_values_error(ratio, clipped):
    """arXiv 1707.06347, equation 7, for advantages of 1."""
    answers = iter([torch.zeros(2, 4), torch.full((2, 4), math.log(ratio))])
    hidden = SimpleNamespace(last_hidden_state=torch.full((2, 4, 1), 3.0))
    values = SimpleNamespace(base_model=lambda **_: hidden, score=lambda hidden: hidden)
    models = {"trained": lambda **_: next(answers), "value": values, "reward": lambda **_: None}
    run = run_of("ppo", **GENERATED, reference="precomputed")
    away = math.log(ratio)  # the policy before it moved is the reference
    penalty = math.exp(-away) + away - 1
    loss, _ = loss_of(run, models, torch.zeros(2, 4, dtype=torch.long))
    assert loss.item() == pytest.approx(-clipped + 0.1 * penalty + 0.1 * 9)
