"""Images in the sequences of a training step: the pixels that the model sees, and the tokens of each image.

A processor resizes every image before the model sees it. Qwen's processor roughly keeps the number of pixels, and makes
both sides multiples of the block of patches that becomes one token. The other processors make every image a square of
fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, isqrt, sqrt
from typing import Any, NamedTuple

from ..base.errors import NotAvailable, SpecError
from .generic import families
from .model import ModelSpec
from .run import Training


class TooShort(SpecError, NotAvailable):
    """A sequence is too short for its images, so there is also no step from which formulas could be derived."""


class _Resized(NamedTuple):
    """A processor that keeps the number of pixels, between `least` and `MOST` tokens; sides of a patch in pixels."""

    patch: int
    least: int
    token: int  # the id of image tokens, unless the config has another


class _Square(NamedTuple):
    """A processor that makes every image a square; the config may override `side`, in pixels, and `token`."""

    side: int
    patch: int
    token: int
    markers: int


# min_pixels, max_pixels, shortest_edge and longest_edge of the published preprocessor_config.json, as tokens.
MOST = 16384
MARKERS = 2  # Qwen's special tokens around an image: <|vision_start|> and <|vision_end|>
RESIZED = {
    "qwen2_vl": _Resized(14, 4, 151655),
    "qwen2_5_vl": _Resized(14, 4, 151655),
    "qwen3_vl": _Resized(16, 64, 151655),
    "qwen3_vl_moe": _Resized(16, 64, 151655),
    "qwen3_5": _Resized(16, 64, 248056),
    "qwen3_5_moe": _Resized(16, 64, 248056),
}
SQUARE = {
    "gemma3": _Square(224, 16, 262144, 4),  # an empty line, <start_of_image>, <end_of_image>, an empty line
    "llava": _Square(336, 14, 32000, 0),
}
LLAVA_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # whether patches follow a class token


class Images(NamedTuple):
    """The `number` images of a sequence: each is `height` × `width` pixels in patches of `patch` × `patch`, and becomes
    `tokens` tokens with the id `token`, next to `markers` special tokens. `grid`: whether the model's input is a list
    of patches with the sizes of their grid, of `frames` equal frames, instead of a picture."""

    number: int
    height: int
    width: int
    patch: int
    tokens: int
    token: int
    markers: int
    frames: int
    grid: bool

    @property
    def needed(self) -> int:
        """Tokens of a sequence that its images need."""
        return self.number * (self.tokens + self.markers)

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.height // self.patch) * (self.width // self.patch)


def images_of(spec: ModelSpec, run: Training) -> Images | None:
    """Return the images of a sequence of `run` after the model's processor; None if there are none.

    Raises SpecError for a model without images, for `pixels` that its processor does not support, and for sequences
    that are too short; raises NotAvailable for a family whose images are not described here.
    """
    if not run.images:
        return None
    family, config = spec.family, spec.config
    if family in RESIZED:
        images = _resized(spec, run, config.get("vision_config") or {}, RESIZED[family])
    elif family in SQUARE:
        images = _square(spec, run, config, SQUARE[family])
    elif "vision_config" in families().get(family, {}).get("nested", {}):
        raise NotAvailable(f"images={run.images} with {spec.name}: llmlab knows the images of "
                           f"{', '.join([*RESIZED, *SQUARE])}, not of {family}; leave out images, or run your own "
                           "script under llmlab run")  # fmt: skip
    else:
        raise SpecError(f"images={run.images}: {spec.name} takes only text; leave out images, or give a model such as "
                        "Qwen3-VL")  # fmt: skip
    if images.token >= spec.vocab:
        raise SpecError(f"image_token_id={images.token}: the vocabulary of {spec.name} has {spec.vocab} tokens; give a "
                        "smaller image_token_id in the config")  # fmt: skip
    if images.needed > run.seq_len:
        size = f"{images.tokens} tokens each" + (f" and {images.markers} around it" if images.markers else "")
        raise TooShort(f"seq_len={run.seq_len}: {run.images} images of {images.height} × {images.width} pixels are "
                       f"{size}; give seq_len >= {images.needed}, or fewer or smaller images")  # fmt: skip
    return images


def _resized(spec: ModelSpec, run: Training, vision: Mapping[str, Any], processor: _Resized) -> Images:
    if run.pixels is None:
        raise SpecError(f"images={run.images} without pixels: {spec.name} takes images of any size; give, for example, "
                        "pixels=1024*1024 or pixels=(height, width)")  # fmt: skip
    patch, merge = vision.get("patch_size", processor.patch), vision.get("spatial_merge_size", 2)
    sides = run.pixels if isinstance(run.pixels, tuple) else (isqrt(run.pixels),) * 2
    height, width = smart_resize(*sides, side=patch * merge, least=processor.least, most=MOST)
    return Images(
        number=run.images,
        height=height,
        width=width,
        patch=patch,
        tokens=height * width // (patch * merge) ** 2,
        token=spec.config.get("image_token_id", processor.token),
        markers=MARKERS,
        frames=vision.get("temporal_patch_size", 2),
        grid=True,
    )


def smart_resize(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the height and width of an image after Qwen's processors: multiples of `side`, and `least` to `most`
    squares of `side` × `side` (transformers, qwen2_vl/image_processing_qwen2_vl.py, smart_resize).

    >>> smart_resize(720, 1280, side=28, least=4, most=16384)
    (728, 1288)
    """
    if max(height, width) > 200 * min(height, width):
        raise SpecError(f"pixels=({height}, {width}): one side is more than 200 times as long as the other, which "
                        "Qwen's processor refuses; give a less elongated image")  # fmt: skip
    rows, columns = (round(size / side) for size in (height, width))
    if rows * columns > most:
        scale = sqrt(height * width / (most * side**2))
        rows, columns = (max(1, floor(size / scale / side)) for size in (height, width))
    elif rows * columns < least:
        scale = sqrt(least * side**2 / (height * width))
        rows, columns = (ceil(size * scale / side) for size in (height, width))
    return rows * side, columns * side


def _square(spec: ModelSpec, run: Training, config: Mapping[str, Any], processor: _Square) -> Images:
    vision = config.get("vision_config") or {}
    side, patch = vision.get("image_size", processor.side), vision.get("patch_size", processor.patch)
    if run.pixels not in (None, side * side, (side, side)):
        raise SpecError(f"pixels={run.pixels} with {spec.name}, whose processor resizes every image to {side} × "
                        f"{side}; leave out pixels")  # fmt: skip
    if spec.family == "gemma3":
        tokens = config.get("mm_tokens_per_image", 256)
    else:
        tower = vision.get("model_type", "clip_vision_model")
        if tower not in LLAVA_TOWERS:
            raise NotAvailable(f"images={run.images} with {spec.name}: llmlab knows LLaVA with "
                               f"{' or '.join(LLAVA_TOWERS)}, not with {tower}; leave out images, or run your own "
                               "script under llmlab run")  # fmt: skip
        dropped = config.get("vision_feature_select_strategy", "default") == "default"
        tokens = (side // patch) ** 2 + LLAVA_TOWERS[tower] - dropped
    token = config.get("image_token_index", config.get("image_token_id", processor.token))
    return Images(run.images, side, side, patch, tokens, token, processor.markers, frames=1, grid=False)
