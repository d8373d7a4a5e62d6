"""The batch of a step: images in its text, sound and labels."""

from types import SimpleNamespace

import pytest
import torch

import llmlab as lab
from llmlab.base.errors import NotAvailable
from llmlab.specs.images import Images
from llmlab.step.batch import arguments, with_images


def images(**more):
    sizes = {"number": 2, "height": 28, "width": 42, "patch": 14, "frames": 1, "grid": False}
    return Images(**{**sizes, "tokens": 6, "token": 9, "markers": 2, **more})


def model(**more):
    return SimpleNamespace(main_input_name="input_ids", forward=lambda input_ids, labels=None: None, **more)


def test_images_take_the_place_of_text_between_their_markers():
    ids = with_images(torch.arange(20).repeat(2, 1), images())
    image = torch.tensor([[1 <= at < 7 or 9 <= at < 15 for at in range(20)]] * 2)
    assert torch.equal(ids == 9, image) and ids[:, 0].tolist() == [0, 0]
    text = torch.full((1, 20), 9)  # of text, the token would stand for an image
    assert with_images(text, images())[0, [0, 7, 19]].tolist() == [8, 8, 8]
    assert with_images(torch.arange(3), None).tolist() == [0, 1, 2]


def test_pixels_are_of_every_image_of_every_sequence():
    ids = with_images(torch.arange(20).repeat(3, 1), images())
    found = arguments(model(), ids, lab.Training(micro_batch=3, seq_len=20), images())
    assert found["pixel_values"].shape == (3 * 2, 3, 28, 42) and found["token_type_ids"].sum() == 3 * 2 * 6
    rows = images(grid=True, frames=2)
    found = arguments(model(), ids, lab.Training(micro_batch=3, seq_len=20), rows)
    assert found["pixel_values"].shape == (3 * 2 * rows.patches, 3 * 2 * 14**2)
    assert found["image_grid_thw"].tolist() == [[1, 2, 3]] * 6 and found["mm_token_type_ids"].sum() == 36


@pytest.mark.parametrize(("labels", "dtype"), [(1, torch.float32), (3, torch.int64)])
def test_a_classifier_has_a_label_a_sequence(labels, dtype):
    found = arguments(model(), torch.zeros(4, 8, dtype=torch.int64), lab.Training(num_labels=labels))
    assert found["labels"].shape == (4,) and found["labels"].dtype == dtype


def test_a_model_that_listens_gets_all_the_sound_it_takes():
    """Whisper: 80 mel bins, and two frames for each of 1,500 positions."""
    config = SimpleNamespace(num_mel_bins=80, max_source_positions=1500)
    whisper = SimpleNamespace(main_input_name="input_features", config=config, dtype=torch.float16)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    found = arguments(whisper, ids, lab.Training())
    assert found["input_features"].shape == (2, 80, 3000) and found["input_features"].dtype == torch.float16
    assert found["labels"] is ids


def test_what_no_example_is_there_for_is_refused_by_name():
    ids = torch.zeros(1, 8, dtype=torch.int64)
    needs = SimpleNamespace(main_input_name="input_ids", forward=lambda input_ids, boxes, *rest, depth=1, **more: None)
    with pytest.raises(NotAvailable, match="also needs boxes, and"):
        arguments(needs, ids, lab.Training())
    with pytest.raises(NotAvailable, match="takes pixel_values"):
        arguments(SimpleNamespace(main_input_name="pixel_values", config=SimpleNamespace()), ids, lab.Training())
