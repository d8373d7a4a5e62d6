from functools import lru_cache

import pytest
import torch

import llmlab as lab
from llmlab.measurement import report as measure_report

SHAPE = {"micro_batch": 2, "seq_len": 96}


@pytest.fixture(scope="module")
def measured(gpt2, llama):
    """Measure once what several tests look at."""
    models = {"gpt2": gpt2, "llama": llama}

    @lru_cache
    def of(name, kind=lab.Training, **fields):
        fields = {**SHAPE, **fields} if kind is lab.Training else fields
        return lab.measure(models[name], kind(**fields), device="cpu", repeats=1)

    return of


def parameters(measured_model):
    return lab.model(measured_model).parameters


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "autocast-bf16"},
        {"precision": "mixed-bf16", "checkpointing": "full"},
        {"checkpointing": "selective"},
        {"accumulation": 2, "attention": "eager", "optimizer": "sgd"},
    ],
    ids=str,
)
def test_the_parts_add_up_to_the_peak_exactly(measured, name, fields):
    report = measured(name, **fields)
    assert report.outcome == "fits"
    assert sum(report.parts.values()) == report.peak_allocated == max(report.phases.values())
    assert list(report.phases) == ["load", "forward", "backward", "optimizer"]
    assert max(sum(parts.values()) for _, parts in report.timeline) == report.peak_allocated
    assert report.step_seconds > 0 and report.tokens_per_second > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_and_states_are_what_the_precision_says(measured, name, request):
    n = parameters(request.getfixturevalue(name))
    tensors = len(list(tiny(request.getfixturevalue(name)).parameters()))
    steps = 4 * tensors  # AdamW counts its steps in an fp32 scalar a parameter
    for precision, weights, states in (("fp32", 4, 8), ("autocast-bf16", 4, 8)):
        parts = measured(name, precision=precision).parts
        assert (parts["weights"], parts["optimizer"]) == (weights * n, states * n + steps)
    mixed = measured(name, precision="mixed-bf16", checkpointing="full").parts
    assert (mixed["weights"], mixed["optimizer"]) == (2 * n, (4 + 8) * n + steps)
    assert "optimizer" not in measured(name, accumulation=2, attention="eager", optimizer="sgd").parts


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_loading_takes_the_weights_and_the_tied_head_nothing(measured, name, request):
    spec = lab.model(request.getfixturevalue(name))
    ids, frequencies = SHAPE["micro_batch"] * SHAPE["seq_len"] * 8, 8 if spec.norm == "rmsnorm" else 0
    assert measured(name).phases["load"] >= 4 * spec.parameters + ids
    assert measured(name).phases["load"] <= 4 * spec.parameters + ids + 64 * frequencies


def tiny(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def test_after_backward_there_is_a_gradient_byte_for_every_weight_byte(measured, llama):
    report = measured("llama")
    last = next(parts for phase, parts in report.timeline if phase == "optimizer")
    assert last["gradients"] == report.parts["weights"] == 4 * parameters(llama)


def test_gradients_of_earlier_micro_batches_are_there_in_forward(measured, gpt2):
    once, twice = measured("gpt2"), measured("gpt2", accumulation=2)
    more_tokens, last_loss = SHAPE["micro_batch"] * SHAPE["seq_len"] * 8, 4
    assert twice.phases["forward"] - once.phases["forward"] == 4 * parameters(gpt2) + more_tokens + last_loss
    assert twice.flops == 2 * once.flops


def test_after_backward_no_activation_is_left_but_the_loss(measured):
    parts = next(parts for phase, parts in measured("llama").timeline if phase == "optimizer")
    assert parts["activations"] <= 8  # the loss, and its mean
    assert parts["logits"] == 2 * 96 * 1000 * 4  # the loop still names the output


def test_checkpointing_keeps_less_and_selective_lies_between(measured):
    kinds = (None, "selective", "full")
    none, selective, full = (at_end_of_forward(measured("llama", checkpointing=kind)) for kind in kinds)
    assert full < selective < none
    # What "full" keeps of a block is its input: T × hidden in fp32.
    assert full >= 3 * 2 * 96 * 64 * 4


def at_end_of_forward(report):
    return [parts for phase, parts in report.timeline if phase == "forward"][-1]["activations"]


def test_full_checkpointing_runs_the_blocks_forward_again_and_selective_attentions_products_alone(measured):
    none, selective, full = (measured("gpt2", checkpointing=kind).flops for kind in (None, "selective", "full"))
    blocks = 2 * 2 * 96 * 3 * (12 * 64 * 64)  # 2 FLOP per weight, token and layer
    attention = 3 * 4 * 2 * 4 * 96 * 96 * 16  # two products of B·H·T²·d, 2 FLOP each, in each layer
    assert selective == none + attention  # the CPU's SDPA with dropout is plain products
    # The last product of a block is what nothing in backward asks for: recomputation stops before it.
    unneeded = 2 * 2 * 96 * 3 * (4 * 64 * 64)
    assert full - none in (blocks + attention, blocks + attention - unneeded)


def test_flops_are_six_a_weight_and_token_and_attention(measured, llama):
    spec = lab.model(llama)
    weights = sum(x.inputs * x.outputs * x.count for x in spec.linears)
    tokens = SHAPE["micro_batch"] * SHAPE["seq_len"]
    attention = 3 * 4 * SHAPE["micro_batch"] * spec.hidden * SHAPE["seq_len"] ** 2 * spec.layers
    eager, sdpa = (measured("llama", attention=kind).flops for kind in ("eager", "sdpa"))
    assert eager == pytest.approx(6 * tokens * weights + attention, rel=1e-3)
    # FlashAttention's backward computes the scores again: five products where eager has four.
    assert sdpa == pytest.approx(6 * tokens * weights + attention * 14 / 12, rel=1e-3)


def test_activations_are_linear_in_the_batch_and_eager_attention_quadratic_in_the_sequence(measured):
    one, two, three = (at_end_of_forward(measured("llama", micro_batch=b)) for b in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=1e-4)
    short, middle, long = (at_end_of_forward(measured("llama", seq_len=t, attention="eager")) for t in (32, 64, 96))
    second_difference = (long - middle) - (middle - short)
    # Each layer keeps softmax's output, B·H·T²; a scaled copy or a mask comes on top.
    assert second_difference >= 3 * 2 * 4 * 4 * (96**2 - 2 * 64**2 + 32**2)


def test_measuring_twice_gives_the_same_bytes(gpt2):
    run = lab.Training(**SHAPE)
    first, second = (lab.measure(gpt2, run, device="cpu", repeats=1) for _ in range(2))
    assert (first.peak_allocated, first.phases, first.parts, first.detail, first.timeline, first.flops) == (
        second.peak_allocated, second.phases, second.parts, second.detail, second.timeline, second.flops
    )  # fmt: skip


def test_generation_fills_the_cache_with_keys_and_values(measured, llama):
    report = measured("llama", lab.Inference, batch=2, prompt_len=40, new_tokens=8, weights="fp32", kv="fp32")
    assert list(report.phases) == ["load", "prefill", "decode"]
    assert sum(report.parts.values()) == report.peak_allocated
    token = lab.model(llama).kv_elements_per_token * 4
    assert next(parts for phase, parts in report.timeline if phase == "decode")["kv_cache"] == 2 * 40 * token
    most = max(parts.get("kv_cache", 0) for _, parts in report.timeline)
    at_end = 2 * (40 + 7) * token  # the last new token goes through no model
    old_layer = 2 * (40 + 6) * token // 3  # torch.cat: one layer is there twice, without and with the new token
    assert at_end <= most <= at_end + old_layer


def test_lora_has_gradients_and_states_of_its_adapters_only(measured, llama):
    report = measured("llama", lora=lab.LoRA(rank=4, targets=("q_proj", "v_proj")), precision="bf16")
    adapters = 3 * 4 * ((64 + 64) + (64 + 32))
    assert report.parts["weights"] == 2 * parameters(llama) + 4 * adapters  # peft keeps adapters in fp32
    assert report.parts["optimizer"] == 8 * adapters + 4 * 12
    assert sum(report.parts.values()) == report.peak_allocated


@pytest.mark.parametrize(("quantization", "bits"), [("nf4", 4), ("int8", 8)])
def test_quantized_weights_take_their_bits_and_scales(measured, llama, quantization, bits):
    fields = {"lora": lab.LoRA(rank=4, targets=("q_proj", "v_proj")), "precision": "bf16", "checkpointing": "full"}
    report = measured("llama", quantization=quantization, **fields)
    spec = lab.model(llama)
    linears = [x for x in spec.linears if x.part != "head"]
    quantized = sum(x.inputs * x.outputs * x.count for x in linears)
    rows = sum(x.outputs * x.count for x in linears)
    scales = 4 * quantized // 64 + 16 * 4 * 21 if quantization == "nf4" else 4 * rows  # a code book of 16 a layer
    adapters = 3 * 4 * ((64 + 64) + (64 + 32))
    rest = 4 * (spec.parameters - quantized)  # prepare_model_for_kbit_training makes it fp32
    assert report.parts["weights"] == quantized * bits // 8 + scales + rest + 4 * adapters


def test_the_logits_are_known_by_address_too(llama, monkeypatch):
    monkeypatch.setattr(measure_report, "_logits_sizes", lambda *_: [])
    report = lab.measure(llama, lab.Training(**SHAPE), device="cpu", repeats=1)
    assert next(parts for phase, parts in report.timeline if phase == "optimizer")["logits"] == 2 * 96 * 1000 * 4


def test_the_report_says_where_it_was_taken_and_survives_json(measured):
    report = measured("gpt2")
    assert (report.source, report.gpu) == ("measured", None)
    assert report.environment["device"].startswith("CPU") and "torch" in report.environment
    assert report.peak_reserved is None and report.process is None and report.mfu is None
    assert report.capacity > report.peak_allocated
    assert lab.Report.from_json(report.to_json()) == report


def test_nothing_is_left_behind(gpt2):
    import gc

    def tensor_bytes():
        gc.collect()
        return sum(x.nbytes for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter))

    run = lab.Training(**SHAPE, checkpointing="selective")
    lab.measure(gpt2, run, device="cpu", repeats=1)  # imports and caches
    torch.manual_seed(1)
    state, held, dtype = torch.get_rng_state(), tensor_bytes(), torch.get_default_dtype()
    lab.measure(gpt2, run, device="cpu", repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert tensor_bytes() == held
    assert torch.get_default_dtype() == dtype and torch.is_grad_enabled()
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.parametrize("repeats", [0, -1, True, 2.0])
def test_repeats_are_a_count(gpt2, repeats):
    with pytest.raises(lab.SpecError, match="repeats="):
        lab.measure(gpt2, lab.Training(**SHAPE), device="cpu", repeats=repeats)


def test_a_model_too_big_for_this_machine_is_not_started(monkeypatch):
    monkeypatch.setattr(measure_report, "available_memory", lambda: 2**40)  # there are machines that hold its 1.6 TB
    report = lab.measure("meta-llama/Llama-3.1-405B", lab.Training(seq_len=8), device="cpu")
    assert (report.outcome, report.where, report.peak_allocated) == ("out of memory", "load", None)
    assert report.notes[0].code == "not-started"
