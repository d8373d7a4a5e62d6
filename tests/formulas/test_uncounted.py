"""What the formulas of an estimate leave out."""

import pytest

import llmlab as lab
from llmlab.formulas.uncounted import uncounted


@pytest.mark.parametrize(("name", "run", "codes"), [
    ("google/gemma-3-4b-pt", lab.Training(seq_len=1024, images=1), ["tower-time"]),
    ("google/gemma-3-4b-pt", lab.Training(seq_len=1024), []),
    ("openai/whisper-small", lab.Training(seq_len=64), ["sound-time"]),
    ("openai/whisper-small", lab.Inference(prompt_len=64), []),
])  # fmt: skip
def test_the_time_leaves_out_images_and_sound(name, run, codes):
    assert [note.code for note in uncounted(lab.model(name), run)] == codes
