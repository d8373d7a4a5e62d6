"""Steps of vision-language models with images, and of classifiers: what is simulated is what the real class takes."""

import pytest

import llmlab as lab
from llmlab.planning import levers
from llmlab.simulation.depth import depth_of

TEXT = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0}  # fmt: skip
BERT = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
QWEN = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
SQUARE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 56, "patch_size": 14}  # fmt: skip
QWEN_TEXT = {**TEXT, "rope_parameters": ROPE}
CONFIGS = {
    "qwen2_5_vl": {
        "image_token_id": 500, "text_config": QWEN_TEXT,
        "vision_config": {**QWEN, "fullatt_block_indexes": [1], "window_size": 56},
    },
    "qwen3_vl": {
        "image_token_id": 500, "text_config": QWEN_TEXT, "vision_config": {**QWEN, "deepstack_visual_indexes": [0]},
    },
    "gemma3": {
        "image_token_id": 500, "mm_tokens_per_image": 4, "vision_config": SQUARE,
        "text_config": {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    },
    "llava": {
        "image_token_index": 500, "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SQUARE, "model_type": "clip_vision_model"},
    },
}  # fmt: skip
PIXELS = {"qwen2_5_vl": (112, 168), "qwen3_vl": 256 * 320}
BF16_LORA = {"precision": "bf16", "lora": lab.LoRA(4)}


def agree(config, run):
    """To the byte, except for tensors of a few numbers that Python makes on a CPU."""
    simulated, measured = lab.simulate(config, run, "cpu"), lab.measure(config, run, "cpu", repeats=1)
    assert simulated.peak_allocated == pytest.approx(measured.peak_allocated, abs=128)
    for phase in ("forward", "backward", "optimizer"):
        assert simulated.phases[phase] == pytest.approx(measured.phases[phase], abs=128), phase


@pytest.mark.parametrize("fields", [{}, {"checkpointing": "full"}, BF16_LORA], ids=["plain", "checkpointing", "lora"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_with_images_takes_what_is_simulated(family, fields):
    run = lab.Training(micro_batch=2, seq_len=192, images=2, pixels=PIXELS.get(family), **fields)
    agree({"model_type": family, **CONFIGS[family]}, run)


@pytest.mark.parametrize("family", CONFIGS)
def test_images_of_a_trained_tower_take_memory_on_a_gpu(family):
    config, pixels = {"model_type": family, **CONFIGS[family]}, PIXELS.get(family)
    peaks = [
        lab.simulate(config, lab.Training(seq_len=256, images=images, pixels=pixels if images else None), "A100-80GB")
        .phases["forward"] for images in (0, 1, 2)
    ]  # fmt: skip
    assert peaks[0] < peaks[1] < peaks[2]


def test_an_estimate_with_images_is_derived_from_the_code(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMLAB_CACHE", str(tmp_path))
    config = {"model_type": "gemma3", **CONFIGS["gemma3"]}
    run = lab.Training(micro_batch=2, seq_len=256, images=2)
    estimated, simulated = lab.estimate(config, run, "A100-80GB"), lab.simulate(config, run, "A100-80GB")
    assert "plain-transformer" not in {note.code for note in estimated.notes}
    assert estimated.peak_allocated == pytest.approx(simulated.peak_allocated, rel=0.01)
    half = levers.Change("half the sequence length", "02-memory-anatomy", {"seq_len": 128}, False)
    monkeypatch.setattr(levers, "changes", lambda *_: [half])  # each of them takes as many simulations
    (lever,) = lab.fix(config, run, "A100-80GB").levers
    assert "derived" in {note.code for note in lever.report.notes}
    by_plain_formulas = lab.estimate(config, run)
    assert "tower-time" in {note.code for note in by_plain_formulas.notes}


def test_layers_that_get_the_towers_features_do_not_repeat():
    text = {**QWEN_TEXT, "num_hidden_layers": 8}
    vision = {**QWEN, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    spec = lab.model({"model_type": "qwen3_vl", **CONFIGS["qwen3_vl"], "text_config": text, "vision_config": vision})
    assert depth_of(spec).first >= 3


QWEN3_VL_8B = {
    "model_type": "qwen3_vl", "image_token_id": 151655,
    "text_config": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}  # fmt: skip


def test_published_steps_of_qwen3_vl_on_an_a40():
    """4 and 24 images of 224 × 224 in 276 and 1596 tokens: 22.1 and 37.9 GB (yiqiao-yin/deepspeed-course, pull request
    31). That run is DeepSpeed's ZeRO-3 on one GPU. Its linear layers keep each input, also where the weight is frozen:
    the normalized inputs of attention and of the MLP, and that of down_proj, in bf16 in each of 36 layers."""
    lora = lab.LoRA(16, ("q_proj", "k_proj", "v_proj", "o_proj"), dropout=0.05)
    runs = [lab.Training(seq_len=tokens, images=images, pixels=(224, 224), precision="bf16", lora=lora)
            for tokens, images in ((276, 4), (1596, 24))]  # fmt: skip
    few, many = [lab.simulate(QWEN3_VL_8B, run, "A40").peak_allocated for run in runs]
    kept = 36 * 2 * (4096 + 4096 + 12288)
    assert (many - few) / (1596 - 276) + kept == pytest.approx((37.9e9 - 22.1e9) / (1596 - 276), rel=0.02)
    assert 0.9 < many / 37.9e9 < few / 22.1e9 < 1


@pytest.mark.parametrize("fields", [{"num_labels": 3}, {"num_labels": 1, "checkpointing": "full"}])
@pytest.mark.parametrize("family", ["bert", "modernbert", "llama"])
def test_a_classifier_takes_what_is_simulated(family, fields):
    layers = {"layer_types": ["full_attention", "sliding_attention"]} if family == "modernbert" else {}
    agree({"model_type": family, **(TEXT if family == "llama" else BERT), **layers},
          lab.Training(micro_batch=2, seq_len=32, **fields))  # fmt: skip


def test_a_classifier_that_transformers_lacks_is_refused():
    with pytest.raises(lab.NotAvailable, match="no sequence classifier of whisper"):
        lab.simulate({"model_type": "whisper"}, lab.Training(seq_len=32, num_labels=2), "T4")


def test_a_classifier_has_no_logits_of_the_vocabulary():
    run = lab.Training(micro_batch=4, seq_len=1024, precision="bf16", num_labels=2)
    estimated, simulated = (verb("Qwen2.5-0.5B", run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert "logits" not in estimated.parts
    assert estimated.peak_allocated == pytest.approx(simulated.peak_allocated, rel=0.05)


SMALL = {"model_type": "llama", "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 688,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "max_position_embeddings": 512}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("fields", [
    {"method": "reward"}, {"num_labels": 3}, {"method": "reward", "precision": "mixed-bf16", "zero": 3, "dp": 4},
    {"method": "reward", "lora": lab.LoRA(rank=8), "quantization": "nf4"},
])  # fmt: skip
def test_a_classifier_has_no_head_of_a_language_model(tied, fields, agree):
    run = lab.Training(**{"micro_batch": 4, "seq_len": 512, "precision": "autocast-bf16", **fields})
    model = {**SMALL, "tie_word_embeddings": tied}
    agree(model, run)
