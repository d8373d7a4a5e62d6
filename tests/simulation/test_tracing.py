"""Estimates that are derived from a family's code agree with its simulation."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.planning import levers
from llmlab.simulation import tracing
from llmlab.traces.kernels import Kernel, KernelFormula, KernelTrace
from llmlab.traces.polynomials import Monomial, constant

TEXT = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 4096,
        "pad_token_id": 0}  # fmt: skip
BERT = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
OLMO = {"model_type": "olmo2", **TEXT}
DEEP = {**OLMO, "num_hidden_layers": 8, "max_position_embeddings": 8192}
GPT_OSS = {"model_type": "gpt_oss", **TEXT, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128}
DEEPSEEK = {**lab.model("deepseek-ai/DeepSeek-V3").config, "num_hidden_layers": 6, "n_routed_experts": 32, "n_group": 1,
            "topk_group": 1}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **TEXT, "num_hidden_layers": 6, "num_local_experts": 8, "num_experts_per_tok": 2,
           "intermediate_size": 14336}  # fmt: skip
T5 = {"model_type": "t5", "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 6,
      "num_heads": 64}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One for all tests here: several ask for the same trace, which takes five simulations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMLAB_CACHE", str(tmp_path_factory.mktemp("traces")))
        patch.setattr("llmlab.traces.store._kept", {})
        yield


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (OLMO, {}),
        (OLMO, {"precision": "autocast-bf16", "checkpointing": "full"}),
        (OLMO, {"lora": lab.LoRA(8)}),
        (OLMO, {"dp": 8}),
        (OLMO, {"accumulation": 4, "dp": 8, "zero": 2, "precision": "mixed-bf16"}),
        (DEEP, {"dp": 8, "zero": 3, "precision": "mixed-bf16", "checkpointing": "full"}),
        (GPT_OSS, {"checkpointing": "full"}),
        (DEEPSEEK, {"dp": 32, "zero": 3, "precision": "mixed-bf16"}),  # too few layers for one further group
        (MIXTRAL, {"dp": 8, "zero": 3, "precision": "mixed-bf16", "micro_batch": 8}),
        ({**MIXTRAL, "intermediate_size": 4096}, {"precision": "mixed-bf16", "optimizer": "adamw-fused"}),
        ({"model_type": "bert", **BERT}, {"optimizer": "adamw-fused", "dp": 8, "zero": 3, "precision": "fp32"}),
        (T5, {"optimizer": "sgd"}),
    ],
    ids=lambda value: value.get("model_type", str(value)),
)
def test_an_estimate_is_what_is_simulated(config, options):
    run = lab.Training(**{"micro_batch": 4, "seq_len": 1536, "precision": "bf16", **options})
    estimate, simulation = (verb(config, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert "derived" in [note.code for note in estimate.notes]
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.012)
    for phase, size in simulation.phases.items():
        assert estimate.phases[phase] == pytest.approx(size, rel=0.02), phase
    assert estimate.step_seconds == pytest.approx(simulation.step_seconds, rel=0.005)
    for part, seconds in simulation.time.items():
        assert estimate.time[part] == pytest.approx(seconds, rel=0.01, abs=1e-3 * simulation.step_seconds), part


def test_the_last_layers_update_is_a_moment_of_its_own():
    """With master weights, gradients are cast one after another. The largest ones, of experts, are the peak in the last
    layer, because all casts before them stay."""
    run = lab.Training(4, 1536, "mixed-bf16", "adamw-fused")
    estimate, simulation = (verb(MIXTRAL, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert estimate.phases["optimizer"] == pytest.approx(simulation.phases["optimizer"], rel=1e-4)


def test_layers_of_average_size_have_a_wider_margin_where_dense_ones_and_experts_alternate():
    """No pipeline has a trace. The blocks that ZeRO-3 gathers are as large as those with experts."""
    for config, code in ((DEEPSEEK, {"plain-transformer"}), ({**DEEPSEEK, "first_k_dense_replace": 0}, set())):
        report = lab.estimate(config, lab.Training(precision="bf16", pp=3), "A100-80GB")
        assert {note.code for note in report.notes} & {"plain-transformer", "derived"} == code


def test_an_operator_of_a_deeper_layer_follows_the_sizes_even_if_its_bytes_are_no_polynomial():
    """The bytes of T5's attention, whose bias has a gradient, are no sum of three monomials."""
    attention = Kernel("attention", "attention", "fp32", 0, 0, (0, 0), 1, False, "forward")
    tokens, squares = (Monomial(1.0, 0, 1),), (Monomial(4.0, 1, 2),)
    numbers = (squares, tokens, constant(1), constant(0), constant(0), tokens, tokens)
    formula = KernelFormula(attention.with_numbers(0, 0, 0, 0, 0), numbers)
    deep = attention.with_numbers(4 * 64**2, 65, 1, 0, 0, 64, 64)
    trace = tracing._deeper(KernelTrace((formula,), (0,), (0,)), [deep], [deep, deep])
    assert [kernel.shape for kernel in trace.at(2, 128)[1]] == [(128, 128)] * 2


def test_logits_of_as_many_bytes_as_the_gradient_of_the_head_are_told_apart():
    """With as many tokens as the model is wide, 2 · T · V bytes of logits are also the 2 · V · h of a gradient."""
    run = lab.Training(micro_batch=1, seq_len=4096, precision="mixed-bf16", checkpointing="full", dp=8, zero=3)
    report = lab.estimate(DEEP, run, "A100-80GB")
    assert min(report.parts.values()) > 0
    for term in lab.explain(DEEP, run, "A100-80GB").terms:
        assert term.count > 0
        assert term.part != "logits" or "S" in term.formula


def test_one_derivation_answers_for_other_sizes(monkeypatch):
    first = lab.Training(micro_batch=4, seq_len=1536, precision="bf16")
    lab.estimate(OLMO, first, "A100-80GB")
    monkeypatch.setattr(tracing, "derived", None)
    for sizes in ({"micro_batch": 5}, {"seq_len": 1024}, {"micro_batch": 3, "seq_len": 1984}):
        run = replace(first, **sizes)
        estimate, simulation = (verb(OLMO, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
        assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.01)
        assert estimate.step_seconds == pytest.approx(simulation.step_seconds, rel=0.005)


@pytest.mark.parametrize("sequences", [1, 3])
def test_sizes_like_which_there_are_too_few_have_a_trace_of_their_own(sequences, capsys):
    """Sequences as long as the model has positions: one has no size like it, and three have only two."""
    config = {"model_type": "bert", **BERT, "num_hidden_layers": 3, "max_position_embeddings": 512}
    run = lab.Training(micro_batch=sequences, seq_len=512, checkpointing="full")
    estimate, simulation = (verb(config, run, "T4") for verb in (lab.estimate, lab.simulate))
    assert "derived" in [note.code for note in estimate.notes] and not capsys.readouterr().err
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.002)
    assert estimate.step_seconds == pytest.approx(simulation.step_seconds, rel=0.002)


def test_a_peak_is_explained_by_the_tensors_that_are_alive():
    """An eager SwiGLU saves four tensors of its width for each token, AdamW two numbers per weight. Token ids are
    int64, so they have 8 bytes, and not one byte for each of 8 key/value heads."""
    run, config = lab.Training(micro_batch=4, seq_len=1536, precision="bf16"), {**OLMO, "num_key_value_heads": 8}
    peak = lab.explain(config, run, "A100-80GB")
    assert peak.total == sum(term.bytes for term in peak.terms) == lab.estimate(config, run, "A100-80GB").peak_allocated
    assert {term.formula for term in peak.terms if term.part == "inputs"} == {"8 · S · B"}
    layers, tokens = TEXT["num_hidden_layers"], 4 * 1536
    wide = [term for term in peak.terms if term.formula == "2 · intermediate · S · B" and term.part == "activations"]
    assert sum(term.count for term in wide) == 4 * layers  # gate, up, silu(gate), and their product
    kept = 4 * layers * 2 * TEXT["intermediate_size"] * tokens
    assert sum(term.bytes for term in wide) == pytest.approx(kept, rel=0.01)
    states = [term for term in peak.terms if term.part == "optimizer"]
    weights = lab.model(config).parameters
    assert sum(term.bytes for term in states) == pytest.approx(2 * 2 * weights, rel=0.01)
    assert "2 h k d" in peak.latex() and "2 f S B" in peak.latex()
    assert "model.layers.*.mlp" in str(peak)


def test_what_has_no_formula_is_said():
    with pytest.raises(lab.NotAvailable, match="pp"):
        lab.explain(OLMO, lab.Training(pp=2, precision="bf16"), "A100-80GB")


def test_levers_are_derived_too(monkeypatch):
    full = levers.Change("full checkpointing", "08-checkpointing", {"checkpointing": "full"}, True)
    monkeypatch.setattr(levers, "changes", lambda *_: [full])  # each of them takes as many simulations
    fix = lab.fix(OLMO, lab.Training(micro_batch=4, seq_len=1536, precision="bf16"), "A100-80GB")
    (lever,) = fix.levers
    assert "derived" in [note.code for note in lever.report.notes]
    simulation = lab.simulate(OLMO, lever.run, "A100-80GB")
    assert lever.report.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.005)


def test_rotary_positions_have_no_end_and_learned_ones_do():
    run = lab.Training(micro_batch=1, seq_len=8192, precision="bf16")
    estimate, simulation = (verb(OLMO, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))  # of 4,096
    for report in (estimate, simulation):
        assert "beyond-positions" in [note.code for note in report.notes]
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.01)
    with pytest.raises(lab.SpecError, match="gpt2 has 1024 positions"):
        lab.estimate("gpt2", run, "A100-80GB")


@pytest.mark.parametrize("config", [OLMO, {"model_type": "llama", **TEXT}], ids=["olmo2", "llama"])
def test_all_linear_adapts_every_linear_layer_but_the_head(config):
    """As peft's target_modules="all-linear" does."""
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    runs = (lab.Training(seq_len=512, lora=lab.LoRA(8, targets=names)) for names in (("all-linear",), layers))
    every, named = (lab.simulate(config, run, "A100-80GB").peak_allocated for run in runs)
    assert every == named
    assert lab.estimate(config, lab.Training(seq_len=512, lora=lab.LoRA(8, targets=("all-linear",))),
                        "A100-80GB").peak_allocated == pytest.approx(every, rel=0.01)  # fmt: skip
