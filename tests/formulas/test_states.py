"""What a device holds for as long as training lasts, held to a list of every tensor of the model."""

import math
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.states import adapter_parameters, device_parameters, factored_elements, states, unsplit
from llmlab.specs.stages import stage_layers

HIDDEN, WIDTH, KEYS, VOCAB, LAYERS, EXPERTS = 64, 176, 16, 1000, 6, 4
LLAMA = {"model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": LAYERS, "intermediate_size": WIDTH, "vocab_size": VOCAB,
         "max_position_embeddings": 256}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
GPT = {"model_type": "gpt2", "n_embd": HIDDEN, "n_head": 4, "n_layer": LAYERS, "n_positions": 256, "vocab_size": VOCAB}
MODELS = {"llama": LLAMA, "tied": TIED, "mixtral": MIXTRAL, "gpt2": GPT}
LORA = lab.LoRA(rank=4, targets=("q_proj", "down_proj"))


def tensors(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Every parameter of the model as transformers makes it: its component and its shape."""
    h, w = HIDDEN, WIDTH
    if name == "gpt2":
        linears = [("attention", (h, 3 * h)), ("attention", (h, h)), ("mlp", (h, 4 * h)), ("mlp", (4 * h, h))]
        block = [each for part, shape in linears for each in ((part, shape), (part, shape[1:]))]  # with biases
        return [*block, *[("norms", (h,))] * 4] * LAYERS + [
            ("embedding", (VOCAB, h)), ("positions", (256, h)), ("norms", (h,)), ("norms", (h,))
        ]  # fmt: skip
    block = [("attention", (h, h))] * 2 + [("attention", (h, KEYS))] * 2 + [("norms", (h,))] * 2
    if name == "mixtral":
        block += [("router", (EXPERTS, h)), ("experts", (EXPERTS, 2 * w, h)), ("experts", (EXPERTS, h, w))]
    else:
        block += [("mlp", (w, h))] * 2 + [("mlp", (h, w))]
    around = [("embedding", (VOCAB, h)), ("norms", (h,))] + ([] if name == "tied" else [("head", (VOCAB, h))])
    return block * LAYERS + around


def count(name: str, *parts: str) -> int:
    return sum(math.prod(shape) for part, shape in tensors(name) if not parts or part in parts)


@pytest.mark.parametrize("name", MODELS)
def test_a_lone_device_holds_every_tensor(name: str) -> None:
    spec = lab.model(MODELS[name])
    whole = device_parameters(spec, (LAYERS,), 0)
    assert {part: size for part, size in whole.items() if size} == {
        part: count(name, part) for part, _ in tensors(name)
    }
    sizes = states(spec, lab.Training(precision="mixed-bf16"))
    assert (sizes.weights, sizes.gradients, sizes.optimizer) == tuple(n * count(name) for n in (2, 2, 12))
    assert sizes.trained == count(name)


@pytest.mark.parametrize(("pp", "tp", "ep"), [(3, 1, 1), (1, 2, 1), (1, 1, 2), (4, 2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_the_layers_of_their_stage_and_a_share_of_each_matrix(name: str, pp: int, tp: int, ep: int) -> None:
    """Norms, router and positions are whole on every rank; a tied head is a second copy of the embedding."""
    spec = lab.model(MODELS[name])
    for stage in range(pp):
        layers = stage_layers(LAYERS, pp)[stage]
        held = device_parameters(spec, stage_layers(LAYERS, pp), stage, tp, tp * ep)
        for part, cut in {"attention": tp, "mlp": tp, "experts": tp * ep, "router": 1}.items():
            assert held.get(part, 0) == count(name, part) // LAYERS * layers // cut
        first, last = stage == 0, stage == pp - 1
        tied = name in ("tied", "gpt2")
        assert held["embedding"] == (VOCAB * HIDDEN // tp if first or (tied and last) else 0)
        assert held.get("head", 0) == (VOCAB * HIDDEN // tp if last and not tied else 0)
        assert held.get("positions", 0) == (256 * HIDDEN if first and name == "gpt2" else 0)
        assert held["norms"] == pytest.approx(count(name, "norms") * layers / LAYERS, abs=1)


@pytest.mark.parametrize("name", MODELS)
def test_adafactor_keeps_a_row_and_a_column_of_each_matrix_and_vectors_whole(name: str) -> None:
    """Of three dimensions the first stays (torch.optim.Adafactor): a row and a column of each expert."""
    kept = sum(math.prod(shape[:-2]) * sum(shape[-2:]) for _, shape in tensors(name))
    spec, run = lab.model(MODELS[name]), lab.Training(optimizer="adafactor", seq_len=16)
    assert factored_elements(spec, run) == kept
    assert states(spec, run).optimizer == 4 * kept
    assert states(spec, replace(run, dp=4, zero=1)).optimizer == pytest.approx(kept, abs=4)
    stages = [states(spec, replace(run, pp=3, accumulation=3), stage).optimizer for stage in range(3)]
    copies = VOCAB * HIDDEN if name in ("tied", "gpt2") else 0  # the tied head is held twice
    assert sum(stages) == pytest.approx(4 * kept * (1 + copies / count(name)), rel=0.002)


def test_adapters_are_two_thin_matrices_beside_every_target() -> None:
    """peft: rank × inputs and outputs × rank, in fp32, over q_proj and down_proj of each layer."""
    thin = [shape for _ in range(LAYERS) for shape in ((4, HIDDEN), (HIDDEN, 4), (4, WIDTH), (HIDDEN, 4))]
    trained = sum(map(math.prod, thin))
    spec, run = lab.model(LLAMA), lab.Training(precision="bf16", lora=LORA, seq_len=16)
    assert adapter_parameters(spec, run) == trained
    held = states(spec, run)
    assert held.weights == 2 * count("llama") + 4 * trained == held.shard
    assert (held.gradients, held.optimizer, held.trained) == (4 * trained, 8 * trained, trained)
    assert factored_elements(spec, run) == sum(map(sum, thin))
    assert states(spec, replace(run, optimizer="adafactor")).optimizer == 4 * sum(map(sum, thin))
    assert states(spec, replace(run, tp=2)).trained == pytest.approx(trained / 2, rel=0.02)  # norms are not cut


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_what_is_quantized_are_the_blocks_linears(name: str, quantization: str) -> None:
    """The rest in fp32 (peft): embedding, head, norms, and experts, which are no linears to bitsandbytes.

    nf4: half a byte and an fp32 scale for 64; int8: a byte and an fp32 scale for each output.
    """
    lora = lab.LoRA(rank=4, targets=("q_proj",))
    spec, run = lab.model(MODELS[name]), lab.Training(precision="bf16", lora=lora, quantization=quantization)
    linears = count(name, "attention", "mlp")
    rows = LAYERS * (2 * HIDDEN + 2 * KEYS + (2 * WIDTH + HIDDEN if name == "llama" else 0))
    stored = linears // 2 + linears // 16 if quantization == "nf4" else linears + 4 * rows
    adapters = LAYERS * 4 * 2 * HIDDEN
    assert states(spec, run).weights == stored + 4 * (count(name) - linears) + 4 * adapters
    stages = [states(spec, replace(run, pp=3, accumulation=3), stage).weights for stage in range(3)]
    assert sum(stages) == pytest.approx(states(spec, run).weights, abs=1000)


@pytest.mark.parametrize(("precision", "wide"), [("mixed-bf16", 4), ("bf16", 2), ("autocast-bf16", 4)])
def test_fsdp_keeps_fp32_shards_of_frozen_weights_under_mixed_precision(precision: str, wide: int) -> None:
    spec = lab.model(LLAMA)
    run = lab.Training(precision=precision, lora=LORA, dp=4, zero=2, seq_len=16)
    adapters = adapter_parameters(spec, run)
    assert states(spec, run).shard == pytest.approx((wide * count("llama") + 4 * adapters) / 4, abs=4)
    half = 4 if precision == "autocast-bf16" else 2
    assert states(spec, run).weights == half * count("llama") + 4 * adapters
    cut = states(spec, replace(run, zero=3))
    assert cut.weights == pytest.approx((half * count("llama") + 4 * adapters) / 4, abs=4)
    assert states(spec, replace(run, zero=0)).shard == half * count("llama") + 4 * adapters  # nothing is sharded
    ddp = states(spec, replace(run, zero=1))  # nor gathered: what rank 0 keeps is what it computes with
    assert ddp.shard == pytest.approx((half * count("llama") + 4 * adapters) / 4, abs=4)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_divides_states_then_gradients_then_weights_by_all_that_hold_the_same(zero: int) -> None:
    """Context-parallel ranks hold the same parameters: dp · cp share them."""
    spec, run = lab.model(LLAMA), lab.Training(precision="mixed-bf16", dp=4, cp=2, zero=zero, seq_len=64)
    held, whole = states(spec, run), count("llama")
    share = whole // 8
    assert held.optimizer == 12 * (share if zero >= 1 else whole)
    assert held.trained == (share if zero >= 1 else whole)
    assert held.gradients == 2 * (share if zero >= 2 else whole)
    assert held.weights == (2 * whole // 8 if zero == 3 else 2 * whole)
    assert held.shard == (2 * whole // 8 if zero >= 1 else 2 * whole)


def test_the_largest_gradient_waits_for_its_way_to_the_host() -> None:
    run = lab.Training(precision="mixed-bf16", offload="optimizer", seq_len=16)

    def waits(stage: int = 0, model: dict[str, object] = LLAMA, **settings: object) -> int:
        held = states(lab.model(model), replace(run, **settings), stage)
        assert held.optimizer == 0 < held.weights
        return held.gradients

    assert waits() == 2 * VOCAB * HIDDEN
    assert waits(tp=2) == 2 * VOCAB * HIDDEN // 2
    assert waits(model={**LLAMA, "vocab_size": 100}) == 2 * WIDTH * HIDDEN  # a matrix of the MLP is larger
    assert waits(model={**LLAMA, "vocab_size": 100}, tp=2) == 2 * WIDTH * HIDDEN // 2
    assert waits(stage=1, pp=3, accumulation=3) == 2 * WIDTH * HIDDEN  # a stage between has neither table
    assert waits(stage=2, pp=3, accumulation=3) == 2 * VOCAB * HIDDEN  # the head
    assert waits(model=MIXTRAL, dp=2, ep=2) == 2 * VOCAB * HIDDEN
    assert waits(model={**MIXTRAL, "vocab_size": 100}, dp=2, ep=2) == 2 * EXPERTS * 2 * WIDTH * HIDDEN // 2
    assert waits(lora=LORA) == 4 * (4 * 2 * HIDDEN + 4 * (WIDTH + HIDDEN))  # a layer's adapters, in fp32
    both = states(lab.model(LLAMA), replace(run, offload="optimizer+parameters", zero=3, dp=2))
    assert both.weights == both.optimizer == 0


@pytest.mark.parametrize(("zero", "stepped"), [(0, 1.0), (1, VOCAB * HIDDEN / count("tied")), (2, 1 / 8)])
def test_zero_1_deals_out_whole_tensors(zero: int, stepped: float) -> None:
    """torch's ZeroRedundancyOptimizer: of eight ranks, rank 0 has the embedding, which is more than an eighth."""
    spec = lab.model(TIED)
    held = states(spec, lab.Training(precision="bf16", dp=8, zero=zero, seq_len=16) if zero else lab.Training())
    assert held.trained == pytest.approx(stepped * count("tied"), abs=1)
    cut_evenly = states(spec, lab.Training(precision="mixed-bf16", dp=8, zero=1, seq_len=16))  # DeepSpeed's flat buffer
    assert cut_evenly.trained == count("tied") // 8
    adapters = lab.Training(precision="bf16", dp=8, zero=1, lora=LORA, seq_len=16)
    assert states(spec, adapters).trained == adapter_parameters(spec, adapters) // 8


@pytest.mark.parametrize("precision", ["bf16", "mixed-bf16"])
def test_fsdp_pads_the_experts_to_the_ranks(precision: str) -> None:
    """Four experts of a layer on three ranks: two, two and none, and all else in thirds."""
    spec = lab.model(MIXTRAL)
    wide = 4 if precision == "mixed-bf16" else 2
    held = states(spec, lab.Training(precision=precision, lora=LORA, dp=3, zero=3, seq_len=16))
    experts = count("mixtral", "experts")
    adapters = adapter_parameters(spec, lab.Training(lora=LORA, seq_len=16))
    rest = (wide * (count("mixtral") - experts) + 4 * adapters) / 3
    assert held.shard == pytest.approx(wide * experts / 2 + rest, abs=4)


@pytest.mark.parametrize("settings", [
    {"lora": LORA}, {"lora": LORA, "dp": 7, "zero": 3}, {"dp": 7, "zero": 3}, {"lora": LORA, "offload": "optimizer"},
    {"dp": 7, "zero": 3, "offload": "optimizer"}, {"tp": 8, "offload": "optimizer"}, {"pp": 3, "accumulation": 3},
    {"optimizer": "adafactor", "dp": 7, "zero": 2}, {"lora": LORA, "quantization": "nf4", "dp": 7, "zero": 3},
])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_whole_numbers(name: str, settings: dict[str, object]) -> None:
    """Also where ranks do not divide what they share."""
    if name == "gpt2" and "lora" in settings:
        settings = {**settings, "lora": lab.LoRA(rank=3, targets=("c_attn",))}
    run = lab.Training(**{"precision": "mixed-bf16", "seq_len": 16} | settings)
    held = states(lab.model({**MODELS[name], "vocab_size": 1001}), run)
    assert all(type(value) is int for value in (*held[:-1], *held.units) if value is not None), held


def test_the_states_of_adamw_leave_as_much_unsplit_as_two_copies_of_the_weights() -> None:
    """GPT-2's embedding ends less than 1 MiB before a multiple of 2 MiB. Eight ranks share the states as one piece."""
    gpt2 = lab.model("gpt2")
    weights, moments = unsplit(gpt2, lab.Training())
    assert moments == 2 * weights > 0
    for fields in ({"optimizer": "sgd"}, {"offload": "optimizer"}, {"dp": 8, "zero": 1}):
        assert unsplit(gpt2, lab.Training(**fields)) == (weights, 0)


# ---- frozen layers


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DENSE = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
# A model of 34B, fine-tuned with Axolotl on 24 GB: https://github.com/axolotl-ai-cloud/axolotl/pull/1000
YI = {
    "model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60,
    "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip


def run(**given):
    usual = {"micro_batch": 2, "seq_len": 512, "precision": "autocast-bf16", "lora": lab.LoRA(8, ALL)}
    return lab.Training(**{**usual, "quantization": "nf4", **given})


def weights(model, **given):
    return states(lab.model(model), run(**given)).weights


@pytest.mark.parametrize("checkpointing", [None, "full"])
@pytest.mark.parametrize("frozen", [
    {"double_quant": True}, {"half_layers": "all"}, {"half_layers": "all", "quantization": "int8"},
    {"half_layers": "embeddings", "double_quant": True}, {"half_layers": "all", "quantization": None},
    {"half_layers": "all", "quantization": None, "lora": lab.LoRA(8, ("q_proj", "v_proj"), dropout=0.1)},
])  # fmt: skip
def test_the_formula_is_the_simulation(frozen, checkpointing, agree):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    step = run(**frozen, checkpointing=checkpointing)
    formula, simulation = agree(DENSE, step, "A100-80GB", 0.015)
    of_weights = 0.01 if step.quantization == "int8" else 0.002  # double quantization is 0.4 % of them here
    assert formula.parts["weights"] == pytest.approx(simulation.parts["weights"], rel=of_weights)


def test_double_quantization_saves_three_eighths_of_a_bit_per_weight():
    """QLoRA, arXiv 2305.14314, section 3: 32 / 64 = 0.5 bits become 8 / 64 + 32 / (64 · 256) = 0.127."""
    spec = lab.model(YI)
    saved = weights(YI) - weights(YI, double_quant=True)
    assert saved * 8 / spec.block_linear_elements == pytest.approx(0.5 - 0.127, abs=0.001)


def test_half_layers_take_two_bytes_less_for_each_weight_that_is_not_quantized():
    spec = lab.model(YI)
    tables = 2 * spec.vocab * spec.hidden
    norms = spec.parameters - spec.block_linear_elements - tables
    assert weights(YI) - weights(YI, half_layers="embeddings") == 2 * tables
    assert weights(YI) - weights(YI, half_layers="all") == 2 * (tables + norms)
    plain = [weights(YI, quantization=None, half_layers=each) for each in (None, "all")]
    assert plain[0] - plain[1] == 2 * spec.parameters


def test_both_decide_whether_34b_fits_in_24_gb():
    step = {"micro_batch": 1, "seq_len": 1400, "lora": lab.LoRA(16, ALL), "checkpointing": "full", "attention": "flash",
            "optimizer": "adamw-8bit"}  # fmt: skip
    peft = lab.estimate(YI, run(**step), "RTX-3090-Ti")
    axolotl = lab.estimate(YI, run(**step, double_quant=True, half_layers="all"), "RTX-3090-Ti")
    assert (peft.outcome, axolotl.outcome) == ("out of memory", "unknown")
    assert axolotl.parts["weights"] / 2**30 == pytest.approx(18.30, abs=0.05)  # a script's own, simulated


def test_loras_weights_in_fp32_are_named_with_the_way_to_say_that_they_are_not():
    step = run(quantization=None)
    codes = [[note.code for note in lab.estimate(DENSE, each, "A100-80GB").notes]
             for each in (step, run(quantization=None, half_layers="all"), run(quantization=None, precision="bf16"))]
    assert ["frozen-in-fp32" in each for each in codes] == [True, False, False]


@pytest.mark.parametrize(("given", "words"), [
    ({"quantization": "int8", "double_quant": True}, "only nf4 has scales"),
    ({"precision": "bf16", "half_layers": "all"}, "autocast-bf16"),
    ({"quantization": None, "lora": None, "half_layers": "all"}, "it applies to frozen weights"),
    ({"quantization": None, "half_layers": "embeddings"}, "half_layers='all'"),
    ({"half_layers": "norms"}, "embeddings, all"),
    ({"half_layers": "all", "lora": lab.LoRA(autocast_adapter_dtype=False)}, "autocast_adapter_dtype"),
    ({"half_layers": "all", "quantization": None, "dp": 2, "zero": 3}, "zero=3"),
    ({"double_quant": True, "precision": "bf16", "stack": "torchtune"}, "always quantizes its scales"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(given, words):
    with pytest.raises(lab.SpecError, match=words):
        run(**given)
