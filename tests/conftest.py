"""Settings shared by all tests: random tests take the same cases everywhere, and print how to repeat a failing one."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from llmlab.ranks import launch as launching

sys.path.insert(0, str(Path(__file__).parent.parent))  # the benchmarks, which nobody installs

# deadline: a slow machine is not a failure.
settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")

# Triton decides when it is first imported, by whatever test, whether it compiles or interprets: where there is no
# NVIDIA driver, the kernels' tests need the interpreter.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# What most ranks of tests import. transformers' trainer imports PEFT, which imports bitsandbytes.
launching.PRELOADED += ["pytest", "transformers.models.llama.modeling_llama", "transformers.trainer",
                        "llmlab.course.experiments.model_engines", "llmlab.formulas.report"]  # fmt: skip

IMPORTED = pytest.StashKey[int]()


def pytest_runtest_setup(item):
    """After imports, take what is there out of the search for garbage.

    Each simulation and each measurement collects garbage before it starts. Through torch, transformers and all test
    modules that takes longer than most of them.
    """
    if len(sys.modules) > item.config.stash.get(IMPORTED, 0):
        gc.collect()
        gc.freeze()
        item.config.stash[IMPORTED] = len(sys.modules)


def pytest_unconfigure():
    gc.unfreeze()  # or extensions find their objects alive at the very end, and say so


@pytest.fixture(scope="session", autouse=True)
def patient_ranks():
    """Where a test is not about ranks that hang, the default of ten seconds would be an assertion about time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(launching.launch.__kwdefaults__, "patience", 120.0)
        yield


@pytest.fixture
def agree():
    """Return a function that asserts that estimate and simulate agree on the peak of a run, and on some of its phases,
    and returns both reports."""

    def agree(model, run, gpu="A100-80GB", rel=0.02, **phases):
        import llmlab as lab

        estimate, simulation = lab.estimate(model, run, gpu), lab.simulate(model, run, gpu)
        assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=rel)
        for phase, of_phase in phases.items():
            assert estimate.phases[phase] == pytest.approx(simulation.phases[phase], rel=of_phase)
        return estimate, simulation

    return agree


@pytest.fixture(scope="module")
def one_thread():
    """Torch on one thread: tests run beside each other on few cores, and sums are in the same order every time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def user_records(tmp_path_factory, monkeypatch):
    """The user's own folder of records, empty, so that no test sees or writes what somebody measured."""
    folder = tmp_path_factory.mktemp("user-records")
    monkeypatch.setenv("LLMLAB_RECORDS", str(folder))
    return folder
