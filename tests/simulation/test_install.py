"""The simulator is installed once, and leaves nothing."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import llmlab as lab
from llmlab.base.compat import symbol
from llmlab.base.errors import SpecError
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, bos_token_id=None, eos_token_id=None, use_cache=False)
    return GPT2LMHeadModel(config)


def everything() -> dict:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.amp import autocast_mode

    modules = (torch, torch.cuda, torch.cuda.memory, torch.accelerator, torch.autograd, nn.functional)
    classes = (nn.Module, nn.Parameter, FakeTensor, DataLoader, autocast_mode.autocast, torch.Tensor,
               torch.autograd.profiler.profile)  # fmt: skip
    return {(owner.__name__, name): value for owner in (*modules, *classes) for name, value in vars(owner).items()}


def changed(before: dict, after: dict) -> list:
    return [key for key in before if after.get(key) is not before[key]] + [key for key in after if key not in before]


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_stays_patched(raises):
    with simulator("T4"):
        nn.Linear(3, 3).cuda()  # what torch imports lazily is there
    before = everything()
    with pytest.raises(KeyError) if raises else simulator("V100-16GB"):
        if raises:
            with simulator("T4"):
                nn.Linear(3, 3).cuda()(torch.ones(3, device="cuda")).sum().backward()
                raise KeyError
    assert changed(before, everything()) == []
    assert not torch.cuda.is_available()
    assert type(nn.Linear(3, 3).weight.data) is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(1, device="cuda")
    with simulator("T4"):
        pass


def test_what_torch_first_looks_up_inside_is_its_own():
    """torch keeps the list of functions that torch.device("meta") redirects: with ours in it, a model that is built
    later on the meta device would keep uninitialised weights."""
    listed = symbol("torch.utils._device._device_constructors")
    listed.cache_clear()
    tiny = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    lab.simulate(tiny, lab.Training(seq_len=8), "T4")
    with torch.device("meta"):
        assert torch.tensor([]).is_meta


def test_nesting_is_refused():
    with simulator("T4") as sim:
        with pytest.raises(SpecError, match="T4 is open"), simulator("A100-40GB"):
            pass
        torch.ones(1, device="cuda")
        assert sim.allocated == 0 and sim.peak_allocated == 512


def test_a_second_thread_is_refused():
    caught = []

    def work():
        uses = (torch.cuda.memory_allocated, lambda: torch.ones(1, device="cuda"), lambda: simulator("T4").__enter__())
        for use in uses:
            try:
                use()
            except SpecError as error:
                caught.append(str(error))

    with simulator("T4"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(caught) == 3 and all("thread" in text for text in caught)
