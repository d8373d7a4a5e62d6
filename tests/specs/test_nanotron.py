"""nanotron's division into stages."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.memory.states import states
from llmlab.specs.stages import layers_of

H, F, HEADS, V, TOKENS = 2048, 8192, 32, 131072, 4096
SIZES = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
         "num_hidden_layers": 16, "vocab_size": V, "max_position_embeddings": TOKENS}  # fmt: skip
LLAMA = lab.model({"model_type": "llama", "tie_word_embeddings": False, **SIZES})
RUN = lab.Training(seq_len=TOKENS, dp=8, zero=1, accumulation=4, stack="nanotron")
LAYER = 4 * H * H + 3 * H * F


def test_a_stage_takes_layers_until_it_has_computed_its_share():
    """The head costs as much as 4 layers. The authors' jobs of this model have 10 layers, and 5, on the first of 2 and
    of 4 stages: 17.57 and 11.32 GiB are allocated in their update (bench_final2_mfu2.csv, tied, without ZeRO)."""
    assert V * H == 4 * LAYER
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=2)) == (10, 6)
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=3)) == (7, 7, 2)
    tied = lab.model({**LLAMA.config, "tie_word_embeddings": True})
    for stages, allocated in ((1, 25.07), (2, 17.57), (4, 11.32)):
        run = replace(RUN, zero=0, pp=stages)
        update = lab.estimate(tied, run, "H100-80GB").phases["optimizer"]
        assert update / 2**30 == pytest.approx(allocated, rel=0.01)


def test_head_and_loss_may_be_stages_of_their_own():
    """A quarter of the cost is 5 layers. With 8 stages the last layer and the head share one, and the loss is alone."""
    assert layers_of(LLAMA, replace(RUN, dp=1, zero=0, pp=4)) == (5, 5, 5, 1)
    run = replace(RUN, dp=1, zero=0, pp=8)
    assert layers_of(LLAMA, run) == (3, 2, 3, 2, 3, 2, 0, 1)
    report = lab.estimate(LLAMA, run, "H100-80GB")
    assert report.peak_allocated and report.step_seconds
    assert states(LLAMA, run, stage=6).trained == 0
    deep = lab.model({**LLAMA.config, "num_hidden_layers": 8})  # the head costs a third of all
    assert layers_of(deep, replace(run, pp=3)) == (4, 4, 0)
    with pytest.raises(lab.SpecError, match=r"pp=16 leaves a stage .* 16 layers, because nanotron splits"):
        lab.estimate(LLAMA, replace(run, pp=16), "H100-80GB")
