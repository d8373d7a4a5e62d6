"""What a formula knows of torch's allocator, held to the whole allocator and to what steps on a T4 were measured at."""

from random import Random

import pytest

import llmlab as lab
from llmlab.archive import held_out
from llmlab.base.units import MiB
from llmlab.formulas.memory.segments import Segments, granted, slack
from llmlab.formulas.memory.states import unsplit
from llmlab.simulation.allocator.caching import Allocator


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_those_of_the_whole_allocator(seed):
    """Of 300 requests of 1 to 40 MiB, a third of which is given back."""
    random, whole, short = Random(seed), Allocator(), Segments()
    live, sizes = [], [random.randrange(MiB + 512, 40 * MiB, 512) for _ in range(12)]
    for _ in range(300):
        if live and random.random() < 1 / 3:
            address, block = live.pop(random.randrange(len(live)))
            whole.free(address)
            short.give(*block)
        else:
            before, size = whole.allocated, random.choice(sizes)
            live.append((whole.malloc(size), short.take(size)))
            assert whole.allocated - before == live[-1][1][1]


def test_at_most_a_mebibyte_stays_with_a_request():
    assert [granted(size * MiB) * size for size in (0.5, 9.5, 11, 10.5, 12)] == [0.5, 9.5, 12, 10.5, 12]
    # Three of 6.5 MiB in a segment of 20, the last of which takes the rest.
    assert slack([(int(6.5 * MiB),)] * 6) == MiB
    # Nothing is slack what is given back, nor in the middle of what is free.
    assert slack([(11 * MiB, -1)]) == slack([(20 * MiB, -1), (11 * MiB,)]) == 0


@pytest.mark.parametrize(
    "model, simulated",  # MiB in order of loading, of which 8 or less are of small tensors and of adapters
    [
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 19.6),
        ("deepseek-ai/deepseek-coder-1.3b-base", 19.7),
        ("mistralai/Mistral-7B-v0.3", 32.6),
        ("HuggingFaceTB/SmolLM2-360M", 0.1),
    ],
)
def test_nf4_weights_take_what_they_leave_of_blocks(model, simulated):
    run = lab.Training(quantization="nf4", lora=lab.LoRA(), precision="fp16")
    assert unsplit(lab.model(model), run)[0] / MiB == pytest.approx(simulated, abs=2)


def test_steps_on_a_t4_take_what_is_said():
    """Without the blocks of NF4 weights TinyLlama's are 1.0 to 1.4 % low. Eager scores are another matter."""
    published = [row for row in lab.records(gpu="T4", source="published") if row.run.attention != "eager"]
    assert {held_out(row) for row in published} == {True, False}
    for row in (row for row in published if row.peak_allocated):
        assert lab.estimate(row.model, row.run, "T4").peak_allocated == pytest.approx(row.peak_allocated, rel=0.006)
