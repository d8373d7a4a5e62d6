"""Seconds summed over operators, held to measured steps and operators; and the table of rates derived again."""

import numpy as np
import pytest

import llmlab as lab
from benchmarks.time import efficiencies as derivation
from llmlab import LoRA, Training
from llmlab.archive import records
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.flops import flops
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import moved, update_seconds
from llmlab.simulation.report import recorded


@pytest.fixture(scope="module")
def some_t4_rows():
    return derivation.finetuning_rows(few=11)


@pytest.fixture(scope="module")
def some_a100_rows():
    return derivation.operator_rows(every=4)


def test_a_measured_t4_step():
    # One whole step, as lab.simulate takes it; the rest of the rows below, with the layers between left out.
    rows = [r for r in records("SmolLM2-135M", gpu="T4") if r.step_seconds and r.run.seq_len == 512]
    truth = next(r for r in rows if r.run.attention == "efficient" and r.run.quantization is None)
    found = lab.simulate(truth.model, truth.run, "T4")
    assert found.step_seconds == pytest.approx(truth.step_seconds, rel=0.10)
    assert found.tokens_per_second == truth.run.tokens / found.step_seconds
    assert found.flops == flops(lab.model(truth.model), truth.run, lab.gpu("T4")).total


def test_t4_steps(some_t4_rows):
    errors = np.abs(derivation.relative_errors(some_t4_rows, efficiency("T4")))
    assert np.median(errors) < 0.10
    assert errors.max() < 0.30


def test_a100_operators(some_a100_rows):
    errors = np.abs(derivation.relative_errors(some_a100_rows, efficiency("A100-80GB")))
    assert np.median(errors) < 0.15


@pytest.mark.parametrize("card", ("T4", "A100-80GB"))
def test_the_records_give_the_rates_again(card, some_t4_rows, some_a100_rows):
    rows = {"T4": some_t4_rows, "A100-80GB": some_a100_rows}[card]
    again, kept = derivation.rates_of(card, derivation.derive(card, rows)), efficiency(card)
    # From a part of the rows: near, and nearer than any other GPU's.
    assert again.bandwidth == pytest.approx(kept.bandwidth, rel=0.15)
    assert again.dispatch == pytest.approx(kept.dispatch, rel=0.25)
    for dtype, rate in kept.matmul.items():
        assert again.matmul[dtype] == pytest.approx(rate, rel=0.15)


SEVERAL = [
    {"dp": 8, "zero": 3},
    {"dp": 8, "zero": 3, "dp_replicate": 2},
    {"dp": 8},
    {"dp": 8, "zero": 2, "checkpointing": "full"},
    {},
]


@pytest.mark.parametrize("fields", SEVERAL, ids=str)
def test_simulated_passes_take_what_is_estimated_and_ranks_send_the_same(fields):
    """The update too, which torch makes tensor list by tensor list, but for master copies, which it makes in one."""
    config = {**lab.model("meta-llama/Llama-3.2-1B").config, "num_hidden_layers": 2}
    run = Training(micro_batch=4, seq_len=2048, precision="mixed-bf16" if fields.get("zero") else "bf16", **fields)
    formula, traced = (verb(config, run, "H100") for verb in (lab.estimate, lab.simulate))
    passes = [sum(each.time.values()) - each.time["optimizer"] for each in (formula, traced)]
    assert passes[1] == pytest.approx(passes[0], rel=0.15)
    assert traced.time["optimizer"] == pytest.approx(formula.time["optimizer"], rel=0.1)
    assert traced.time["products"] == pytest.approx(formula.time["products"], rel=1e-6)
    assert traced.time_sources.keys() == traced.time.keys() and bool(traced.time_hidden) == (run.dp > 1)
    # FSDP2's copies are kernels of the passes here, and in the formula part of what data parallelism takes.
    assert (traced.time.get("data", 0) < 0.95 * formula.time.get("data", 0)) == (run.zero >= 2)
    assert sum(traced.time.values()) == pytest.approx(traced.step_seconds)
    assert traced.tokens_per_second == run.global_batch * run.seq_len / traced.step_seconds


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96,
         "intermediate_size": 1024, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_inner": 1280, "vocab_size": 512, "n_positions": 512}
UNDROPPED = {**GPT2, "activation_function": "gelu", "resid_pdrop": 0.0, "attn_pdrop": 0.0}
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WIDE, HALF = LoRA(rank=8, targets=SEVEN, dropout=0.1), LoRA(rank=8, targets=SEVEN, autocast_adapter_dtype=False)
BF16, AUTOCAST = {"precision": "bf16"}, {"precision": "autocast-bf16"}
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
         "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip


RECOMPUTED = {"llama", "autocast", "adapters", "nf4", "int8", "gpt2", "experts"}
BLOCKS = {
    "llama": (LLAMA, BF16),
    "scores": (LLAMA, {**BF16, "attention": "eager"}),
    "fp32": (LLAMA, {"precision": "fp32"}),
    "autocast": (LLAMA, AUTOCAST),
    "adapters": (LLAMA, {**BF16, "lora": WIDE}),
    "half-adapters": (LLAMA, {**BF16, "lora": HALF}),
    "fused-norm": (LLAMA, {**BF16, "kernels": "fused-norm"}),
    "autocast-adapters-scores": (LLAMA, {**AUTOCAST, "lora": WIDE, "attention": "eager"}),
    "nf4": (LLAMA, {**BF16, "lora": WIDE, "quantization": "nf4"}),
    "int8": (LLAMA, {**BF16, "lora": WIDE, "quantization": "int8"}),
    "gpt2": (GPT2, BF16),
    "gpt2-scores": (GPT2, {**BF16, "attention": "eager"}),
    "gpt2-autocast": (GPT2, AUTOCAST),
    "undropped": (UNDROPPED, BF16),
    "undropped-autocast-scores": (UNDROPPED, {**AUTOCAST, "attention": "eager"}),
    "qk-norm": ({**SMALL, "model_type": "qwen3"}, BF16),
    "fused-qkv": ({**SMALL, "model_type": "phi3", "pad_token_id": 0}, BF16),
    "experts": ({**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, BF16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, None) for name in BLOCKS), *((name, "full") for name in sorted(RECOMPUTED))]
)
def test_the_formula_moves_the_bytes_that_the_operators_do(name, checkpointing):
    config, fields = BLOCKS[name]
    run = Training(micro_batch=2, seq_len=256, checkpointing=checkpointing, **fields)
    layers = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"

    def both(config):
        log = recorded(config, run, "A100-80GB").operators
        simulated = sum(kernel.bytes for kernel in log if not kernel.flops and kernel.phase != "optimizer")
        traffic = moved(lab.model(config), run, lab.gpu("A100-80GB"))
        strided = sum(kernel.bytes for kernel in log if kernel.kind == "strided")
        return simulated, traffic.blocks + traffic.loss, strided, traffic.strided

    one, two = (both({**config, layers: n}) for n in (1, 2))  # a layer more: neither logits nor weights
    simulated, formula, strided, gaps = (more - less for more, less in zip(two, one, strict=True))
    assert formula == pytest.approx(simulated, rel=0.1)
    if config is LLAMA and fields in (BF16, AUTOCAST):
        assert gaps == pytest.approx(strided, rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "moved_bytes"),
    [("sgd", 12), ("adamw", 84), ("adamw-fused", 28), ("adafactor", 68), ("lion", 20)],
)
def test_an_update_moves_the_bytes_that_are_estimated(optimizer, moved_bytes):
    """Bytes per parameter in fp32. SGD reads weight and gradient and writes the weight; Lion has one state more, whose
    kernel returns nothing, so only its schema says what it writes; torch's Adafactor goes over its lists 17 times.
    AdamW's 8 operators on lists launch a kernel per 320 · 65,536 elements."""
    spec = lab.model({**lab.model("gpt2").config, "n_layer": 2})
    run, card = Training(seq_len=32, optimizer=optimizer), lab.gpu("A100-80GB")
    operators = recorded(spec, run, card).operators
    bytes_moved = sum(kernel.bytes for kernel in operators if kernel.phase == "optimizer")
    assert bytes_moved / spec.parameters == pytest.approx(moved_bytes, rel=0.01)
    rates = kernels(card)
    launches = 8 * spec.parameters / (320 * 65536) if optimizer == "adamw" else 0
    seconds = moved_bytes * spec.parameters / rates.bandwidth + launches * rates.operators.launch
    assert update_seconds(spec, run, rates) == pytest.approx(seconds)
