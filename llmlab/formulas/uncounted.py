"""What the formulas of an estimate leave out of a run, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..base.notes import Note
from ..specs.generic import auto_class
from ..specs.model import ModelSpec
from ..specs.run import Run, Training


def uncounted(spec: ModelSpec, run: Run) -> Iterator[Note]:
    """Yield a note for each part of a step that its formulas leave out."""
    if not isinstance(run, Training):
        return
    if run.images:
        yield Note(
            "tower-time",
            "The time leaves out the vision tower, which also reads the images; `llmlab simulate` counts it.",
        )
    if auto_class(spec.family) == "AutoModelForSpeechSeq2Seq":
        yield Note(
            "sound-time",
            f"The time counts {run.seq_len} tokens in the encoder and in the decoder, although the encoder reads "
            "frames of sound; `llmlab simulate` counts those.",
        )
