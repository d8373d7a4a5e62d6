"""torch.compile on the simulated GPU without Triton: code runs eager, so that what it takes is an upper figure."""

from dataclasses import replace

import pytest
import torch

import llmlab as lab
from llmlab.planning import confirm
from llmlab.scripts.watch import RAN_OUT_OF_MEMORY, Conditions, watched
from llmlab.simulation.compiled import inductor
from llmlab.simulation.report import simulated
from llmlab.simulation.simulator import EAGER_TOO_LARGE

pytestmark = pytest.mark.usefixtures("no_gpu")

MiB = 2**20
MODEL = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
CARD = lab.gpu("A100-40GB")
RUN = lab.Training(micro_batch=32, seq_len=512, compile=True)


@pytest.fixture(autouse=True)
def _no_triton(monkeypatch):
    monkeypatch.setattr(inductor, "find_spec", lambda name: None)


def with_room(size):
    """The GPU with so many bytes for PyTorch's allocator."""
    return replace(CARD, memory=CARD.memory - CARD.room(1) + size)


def test_an_upper_figure_that_fits_fits_and_one_that_does_not_leaves_the_outcome_open():
    roomy = lab.simulate(MODEL, RUN, CARD)
    assert roomy.outcome == "fits" and EAGER_TOO_LARGE not in roomy.notes
    short = lab.simulate(MODEL, RUN, with_room(roomy.peak_reserved * 3 // 4))
    assert short.outcome == "unknown" and EAGER_TOO_LARGE in short.notes
    assert short.peak_reserved == roomy.peak_reserved
    assert short.where is short.needed is short.process is short.step_seconds is None


def test_what_is_not_compiled_runs_out_of_memory():
    eager = replace(RUN, compile=False)
    taken = lab.simulate(MODEL, eager, CARD).peak_reserved
    assert lab.simulate(MODEL, eager, with_room(taken * 3 // 4)).outcome == "out of memory"
    assert lab.simulate(MODEL, RUN, with_room(MiB)).outcome == "out of memory"  # as weights are loaded


def test_a_plan_takes_no_upper_figure_for_a_refutation(monkeypatch):
    taken = lab.simulate(MODEL, replace(RUN, compile=False), CARD).peak_reserved
    monkeypatch.setattr(confirm, "gpu", lambda name: with_room(taken * 3 // 4))
    assert simulated(MODEL, RUN, with_room(taken * 3 // 4), how_much=False).outcome == "unknown"
    assert confirm.simulated_run(MODEL, RUN, CARD.name) == EAGER_TOO_LARGE


@pytest.mark.parametrize(("compiles", "outcome"), [(True, "unknown"), (False, "out of memory")])
def test_a_script(compiles, outcome):
    def chain(x):
        return x.exp().cos().sin() * 2

    with watched(Conditions(with_room(40 * MiB))) as watch:
        x = torch.zeros(4, MiB, device="cuda")  # 16 MiB, and as much of each operator in eager mode
        with pytest.raises(torch.OutOfMemoryError):
            (torch.compile(chain) if compiles else chain)(x)
        watch.ended = RAN_OUT_OF_MEMORY
        report = watch.report("script")
    assert report.outcome == outcome and (EAGER_TOO_LARGE in report.notes) == compiles
