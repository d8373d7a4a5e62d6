"""The images of a run: how large processors make them, how many tokens they become, and what is refused."""


import pytest

import llmlab as lab
from llmlab.specs.images import MOST, RESIZED, images_of, smart_resize

QWEN3_VL = {"model_type": "qwen3_vl", "text_config": {"vocab_size": 151936}}
LLAVA = {"model_type": "llava", "text_config": {"vocab_size": 32064}}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
GEMMA3 = {"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}}


@pytest.mark.parametrize("size", [(1, 1), (224, 224), (720, 1280), (13, 2000), (6000, 9000), (100, 19000)])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_are_resized_as_by_transformers(family, size):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    known = RESIZED[family]
    side = 2 * known.patch
    bounds = {"min_pixels": known.least * side**2, "max_pixels": MOST * side**2}
    assert smart_resize(*size, side, known.least, MOST) == theirs(*size, factor=side, **bounds)


@pytest.mark.parametrize(
    ("config", "pixels", "tokens"),
    [
        (QWEN3_VL, 1024 * 1024, 1024),
        (QWEN3_VL, (224, 224), 64),  # the processor enlarges it to 256 × 256
        ({"model_type": "qwen2_5_vl"}, (720, 1280), 26 * 46),
        (GEMMA3, None, 256),
        (LLAVA, None, 576),
        ({**LLAVA, "vision_feature_select_strategy": "full"}, None, 577),  # with CLIP's class token
        ({**LLAVA, "vision_feature_select_strategy": "full", "vision_config": SIGLIP}, None, 27 * 27),  # which has none
    ],
)
def test_tokens_of_an_image(config, pixels, tokens):
    run = lab.Training(seq_len=2048, images=1, pixels=pixels)
    assert images_of(lab.model(config), run).tokens == tokens


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ("gpt2", {"images": 1}, "takes only text; leave out images"),
        (QWEN3_VL, {"images": 1}, "give, for example, pixels="),
        (QWEN3_VL, {"images": 2, "pixels": 1024 * 1024, "seq_len": 2048}, "give seq_len >= 2052"),
        (QWEN3_VL, {"images": 1, "pixels": (10, 5000)}, "200 times"),
        (GEMMA3, {"images": 1, "pixels": 512 * 512}, "resizes every image to 896 × 896; leave out pixels"),
        ({"model_type": "llava", "text_config": {"vocab_size": 32000}}, {"images": 1}, "smaller image_token_id"),
    ],
)
def test_images_that_a_model_does_not_take_are_refused(config, fields, words):
    with pytest.raises(lab.SpecError, match=words):
        lab.estimate(config, lab.Training(**fields))


def test_a_family_whose_images_are_not_known_is_named():
    with pytest.raises(lab.NotAvailable, match="not of mllama; leave out images"):
        lab.estimate({"model_type": "mllama"}, lab.Training(images=1))
