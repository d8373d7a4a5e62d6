"""Quantized weights, optimizers' states and key-value caches on the simulated GPU: bytes from first principles."""

from collections import defaultdict
from math import ceil

import pytest
import torch

import llmlab as lab
from llmlab.simulation.simulator import simulator

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from llmlab.simulation.report import NF4_NOTE, recorded

D, DK, FF, LAYERS, VOCAB = 128, 32, 384, 2, 2000  # width, of keys and values together, of the feed-forward
LLAMA = {"model_type": "llama", "hidden_size": D, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": LAYERS, "intermediate_size": FF, "vocab_size": VOCAB,
         "max_position_embeddings": 256, "tie_word_embeddings": False}  # fmt: skip
LINEARS = LAYERS * [(D, D), (DK, D), (DK, D), (D, D), (FF, D), (FF, D), (D, FF)]  # (outputs, inputs)
NORMS = 2 * LAYERS + 1
ADAPTED = lab.LoRA(rank=8, targets=("q_proj", "v_proj"))
CARD = "A100-80GB"


def block(size: int) -> int:
    """Bytes of the block that a request of `size` takes: multiples of 512."""
    return ceil(size / 512) * 512


def adapters(rank: int = 8) -> int:
    """Bytes of fp32 adapters on q_proj (D, D) and v_proj (DK, D)."""
    return LAYERS * sum(block(4 * n) for n in (rank * D, D * rank, rank * D, DK * rank))


def held_after_load(linears: int, width: int) -> int:
    embedding_and_head = 2 * block(width * VOCAB * D)
    inputs_and_rotary = block(8 * 2 * 128) + 2 * block(4 * 8)  # ids, inv_freq and original_inv_freq
    return linears + embedding_and_head + NORMS * block(width * D) + adapters() + inputs_and_rotary


def test_nf4_holds_half_a_byte_a_weight_and_a_scale_a_block_of_64():
    """bitsandbytes/functional.py, quantize_4bit: packed weights, absmax in fp32, and the 16 values of the code."""
    run = lab.Training(micro_batch=2, seq_len=128, precision="bf16", quantization="nf4", lora=ADAPTED)
    linears = sum(block(n * k // 2) + block(n * k // 64 * 4) + block(16 * 4) for n, k in LINEARS)
    assert lab.simulate(LLAMA, run, CARD).phases["load"] == held_after_load(linears, width=4)  # peft casts to fp32


def test_an_nf4_report_says_that_earlier_releases_loaded_in_other_orders():
    """Qwen2.5-7B twice within minutes on one T4: 11,880 and 13,272 MiB reserved; two steps of SmolLM2 three times."""
    run = lab.Training(micro_batch=1, seq_len=16, quantization="nf4", lora=ADAPTED)
    assert [note for note in lab.simulate(LLAMA, run, CARD).notes if note.code == "nf4-load-order"] == [NF4_NOTE]
    assert NF4_NOTE not in lab.simulate(LLAMA, run, "cpu").notes
    repeats = defaultdict(list)
    for row in lab.records(gpu="T4"):
        if row.source == "published" and getattr(row.run, "quantization", None) == "nf4" and row.peak_reserved:
            repeats[row.model, row.run, row.environment.get("session")].append(row.peak_reserved)
    apart = [max(sizes) / min(sizes) - 1 for sizes in repeats.values() if len(sizes) > 1]
    assert len(apart) == 3 and min(apart) > 0 and max(apart) == pytest.approx(13_272 / 11_880 - 1, rel=1e-3)


def test_a_quantized_weight_is_an_instance_of_its_class():
    """lightning/fabric/plugins/precision/bitsandbytes.py asserts it, before it quantizes a layer."""
    import bitsandbytes as bnb

    with lab.simulator("A100-40GB"):
        weights = bnb.nn.Linear4bit(64, 64).cuda().weight, bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).weight
        kinds = bnb.nn.Params4bit, bnb.nn.Int8Params
        assert [[isinstance(each, kind) for kind in kinds] for each in weights] == [[True, False], [False, True]]
        assert not isinstance(torch.nn.Linear(2, 2).weight, kinds)


def test_int8_holds_a_byte_a_weight_and_a_scale_a_row():
    """bitsandbytes/nn/modules.py, Int8Params._quantize: CB, which is the weight, and SCB in fp32."""
    run = lab.Training(micro_batch=2, seq_len=128, precision="bf16", quantization="int8", lora=ADAPTED)
    linears = sum(block(n * k) + block(n * 4) for n, k in LINEARS)
    assert lab.simulate(LLAMA, run, CARD).phases["load"] == held_after_load(linears, width=4)


def test_loading_first_asks_for_all_quantized_weights_in_one_piece():
    """transformers/modeling_utils.py, caching_allocator_warmup: half a byte a quantized weight, two bytes others."""
    run = lab.Inference(batch=1, prompt_len=8, new_tokens=2, weights="nf4")
    first, second = recorded(LLAMA, run, CARD).engine.events[:2]
    weights = sum(n * k for n, k in LINEARS) // 2 + 2 * (2 * VOCAB * D + NORMS * D)
    assert first.size == block(weights) and second.size == -first.size


def test_weights_are_quantized_one_after_the_other_in_the_order_of_their_names():
    run = lab.Inference(batch=1, prompt_len=8, new_tokens=2, weights="nf4")
    taken = [event.size for event in recorded(LLAMA, run, CARD).engine.events[2:40] if event.size > 0]
    half, packed = block(2 * FF * D), block(FF * D // 2)
    # lm_head, embed_tokens, layers.0.input_layernorm, then mlp.down_proj: in 16 bit, its scales or packed, its code
    assert taken[:4] == [block(2 * VOCAB * D)] * 2 + [block(2 * D), half]
    assert packed in taken[4:6]


def test_peft_gives_cached_segments_back_and_stays_as_it_was():
    import peft

    before = peft.prepare_model_for_kbit_training
    run = lab.Training(micro_batch=2, seq_len=128, precision="bf16", quantization="nf4", lora=ADAPTED)
    recording = recorded(LLAMA, run, CARD)
    assert recording.engine.memory.statistics.num_sync_all_streams == 1  # one empty_cache()
    assert peft.prepare_model_for_kbit_training is before


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    import transformers

    path = tmp_path_factory.mktemp("llama")
    config = transformers.AutoConfig.for_model(**LLAMA)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


MAP = 1024  # bytes: 256 values of fp32
BITS = {
    "int8": lambda n, k: block(n * k) + block(4 * n),
    "nf4": lambda n, k: block(n * k // 2) + block(4 * n * k // 64) + 512,
    # Scales in a byte, an offset, the code, and of the scales: one of 256 in fp32, and their map.
    "nf4 double": lambda n, k: (
        block(n * k // 2) + block(n * k // 64) + 512 + 512 + block(4 * ceil(n * k / 64 / 256)) + MAP
    ),
}


@pytest.mark.parametrize("bits", BITS)
def test_a_checkpoint_is_quantized_as_it_is_loaded(saved, bits):
    """transformers/integrations/bitsandbytes.py: each weight comes in bf16, int8's goes through the host and comes
    again in fp16, and is given back. The second GPU in a process takes as much as the first."""
    import transformers

    options = {"load_in_8bit": True} if bits == "int8" else {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": bits == "nf4 double",
    }  # fmt: skip
    wanted = transformers.BitsAndBytesConfig(**options)
    largest, other = FF * D, 2 * block(2 * VOCAB * D) + NORMS * block(2 * D) + 2 * block(4 * 8)
    linears = sum(BITS[bits](n, k) for n, k in LINEARS) + (MAP if bits == "nf4 double" else 0)
    for _ in range(2):
        with simulator(CARD) as sim:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                saved, quantization_config=wanted, device_map={"": 0}, dtype=torch.bfloat16
            )
            assert sim.allocated == linears + other
            taken = [event.size for event in sim._simulated.engine.events if event.size > 0]
            halves = [block(2 * largest)] * (2 if bits == "int8" else 1)
            first = taken.index(halves[0])
            scales = block(4 * D) if bits == "int8" else block(4 * largest // 64)
            assert taken[first : first + len(halves) + 1] == [*halves, scales]
            del model


def parameters() -> list[tuple[int, ...]]:
    return [*LINEARS, (VOCAB, D), (VOCAB, D), *[(D,)] * NORMS]


def elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def adam_8bit(shape: tuple[int, ...]) -> int:
    """Two bytes per parameter and two fp32 scales a block of 256; below 4096 elements both moments in fp32."""
    n = elements(shape)
    return 2 * block(4 * n) if n < 4096 else 2 * (block(n) + block(4 * ceil(n / 256)))


def adafactor(shape: tuple[int, ...]) -> int:
    """torch/optim/_adafactor.py: a row's and a column's variance, a vector's own; `step` is on the host."""
    return sum(block(4 * n) for n in shape)


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("sgd", 0),
        ("lion", sum(block(4 * elements(shape)) for shape in parameters())),
        ("adamw", sum(2 * block(4 * elements(shape)) for shape in parameters())),
        ("adamw-8bit", 2 * block(4 * 256) + sum(map(adam_8bit, parameters()))),  # and two maps of 256 values
        ("adafactor", sum(map(adafactor, parameters()))),
    ],
)
def test_an_optimizer_holds_its_states(optimizer, states):
    run = lab.Training(micro_batch=1, seq_len=16, optimizer=optimizer)
    assert lab.simulate(LLAMA, run, CARD).parts.get("optimizer", 0) == states


@pytest.mark.parametrize("weights", ["bf16", "int8", "nf4"])
def test_a_cache_holds_keys_and_values_and_grows_by_copies(weights):
    """transformers/cache_utils.py, DynamicLayer.update: torch.cat, a new tensor of one more token beside the old."""
    B, T, new = 2, 64, 8
    run = lab.Inference(batch=B, prompt_len=T, new_tokens=new, weights=weights)
    recording = recorded(LLAMA, run, CARD)
    taken = [event.size for event in recording.engine.events]
    for tokens in range(T + 2, T + new):  # T + 1 is in the warm-up too
        size = block(B * tokens * DK * 2)
        assert taken.count(size) >= 2 * LAYERS and taken.count(size) == taken.count(-size), tokens
    report = lab.simulate(LLAMA, run, CARD)
    assert report.parts["kv_cache"] == 2 * LAYERS * block(2 * B * T * DK)  # the peak is in the prefill
    assert report.outcome == "fits" and report.peak_reserved >= report.peak_allocated


def test_kernels_compiled_for_a_gpu_are_refused_by_name():
    run = lab.Training(seq_len=64, precision="bf16", kernels="liger")
    with pytest.raises(lab.NotAvailable, match="kernels='liger' cannot be simulated"):
        lab.simulate(LLAMA, run, CARD)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_the_simulated_cpu_is_the_measured_one(quantization):
    run = lab.Training(micro_batch=2, seq_len=128, precision="bf16", quantization=quantization, lora=ADAPTED)
    measured = lab.measure(LLAMA, run, "cpu", repeats=1)
    assert lab.simulate(LLAMA, run, "cpu").peak_allocated == pytest.approx(measured.peak_allocated, rel=0.001)
