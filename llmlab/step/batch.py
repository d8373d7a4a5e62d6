"""The batch of a step, as a processor and a data loader make it: images in its text, sound and labels.

T  seq_len     B  micro_batch
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import NotAvailable
from ..specs.images import Images
from ..specs.run import Training

CHANNELS = 3  # of an image


def with_images(ids: Tensor, images: Images | None) -> Tensor:
    """Return `ids`, (B, T), in which the tokens of `images` have taken the place of text."""
    if images is None:
        return ids
    ids[ids == images.token] = images.token - 1 if images.token else 1  # in text it would stand for an image
    for number in range(images.number):
        begin = number * (images.tokens + images.markers) + images.markers // 2
        ids[:, begin : begin + images.tokens] = images.token
    return ids


def arguments(model: Any, ids: Tensor, run: Training, images: Images | None = None) -> dict[str, Tensor]:
    """Return the arguments of a training step's forward pass: the tokens, which are the labels too, and the images.

    A model that listens gets the features of as much sound as it takes, (B, mel bins, frames), with the tokens as
    labels. A classifier's labels are one for each sequence.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if getattr(model, "main_input_name", "input_ids") == "input_ids":
        inputs = {"input_ids": ids, "labels": ids}
        if run.num_labels:  # with one label the loss is that of a regression
            dtype = torch.float32 if run.num_labels == 1 else torch.int64
            inputs["labels"] = torch.zeros(len(ids), dtype=dtype, device=ids.device)
        if images:
            inputs |= _of_images(ids, images)
        if missing := [name for name in _required(model) if name not in inputs]:
            raise NotAvailable(f"{type(model).__name__} also needs {', '.join(missing)}, and llmlab has no "
                               "example of that; run your own script under llmlab run")  # fmt: skip
        return inputs
    config = model.config
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if model.main_input_name != "input_features" or bins is None or positions is None:
        raise NotAvailable(f"{type(model).__name__} takes {model.main_input_name}, and llmlab has no example of that; "
                           "run your own script under llmlab run")  # fmt: skip
    frames = 2 * positions  # Whisper's second convolution has a stride of two
    features = torch.zeros(len(ids), bins, frames, dtype=model.dtype, device=ids.device)
    return {"input_features": features, "labels": ids}


def _required(model: nn.Module) -> tuple[str, ...]:
    """Return the arguments of a model's forward pass that have no default."""
    named = signature(model.forward).parameters.values()
    return tuple(one.name for one in named if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD)


def _of_images(ids: Tensor, images: Images) -> dict[str, Tensor]:
    """Return what processors add to the tokens: pixels in fp32, and which tokens are an image's."""
    count = len(ids) * images.number
    kinds = (ids == images.token).long()
    if not images.grid:
        pixels = torch.zeros(count, CHANNELS, images.height, images.width, device=ids.device)
        return {"pixel_values": pixels, "token_type_ids": kinds}
    pixels = torch.zeros(count * images.patches, CHANNELS * images.frames * images.patch**2, device=ids.device)
    grid = [1, images.height // images.patch, images.width // images.patch]
    return {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([grid] * count, device=ids.device),
        "mm_token_type_ids": kinds,
    }
