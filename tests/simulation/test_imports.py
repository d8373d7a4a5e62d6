"""What is first imported inside a simulation is as without one when it has ended."""

import importlib
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from types import ModuleType

import pytest
import torch

import llmlab as lab
from llmlab.simulation.patching import imports
from llmlab.simulation.patching.imports import on_import, swept

pytestmark = pytest.mark.usefixtures("no_gpu")

IMPORTED = """
import functools
from os import replace
from os.path import exists
from shutil import copyfile

import torch
from torch import Generator, compile, empty, get_default_device, get_rng_state, load, tensor
from torch.accelerator import current_accelerator
from torch.cuda import CUDAGraph, Event, empty_cache, graph, is_available, synchronize as wait
from torch.version import cuda

BY_NAME = {"wait": wait}


class Interface:
    Event = Event
    is_available = is_available
    wait = staticmethod(wait)

    def ready(self, ask=is_available):
        return ask()


def ready(ask=is_available, *, wait=wait):
    return ask()


@functools.cache
def is_ready():
    return torch.cuda.is_available()


inside = is_ready(), is_available(), ready(), Interface().ready(), cuda is not None, exists("kept")
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    (tmp_path / "imported_inside.py").write_text(IMPORTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_inside", raising=False)
    return lambda: importlib.import_module("imported_inside")


@pytest.mark.parametrize("raises", [False, True])
def test_a_module_imported_inside_has_torchs_functions_after_it(imported, raises):
    with suppress(KeyError), lab.simulator("T4"):
        module = imported()
        if raises:
            raise KeyError
    assert module.inside == (True, True, True, True, True, False)
    for name in ("Generator", "compile", "empty", "get_default_device", "load"):
        assert getattr(module, name) is getattr(torch, name)
    for name in ("CUDAGraph", "Event", "empty_cache", "graph", "is_available"):
        assert getattr(module, name) is getattr(torch.cuda, name)
    real = torch.cuda.synchronize
    assert module.wait is module.BY_NAME["wait"] is module.Interface.wait is module.ready.__kwdefaults__["wait"] is real
    assert module.Interface.Event is torch.cuda.Event and module.Interface.is_available is torch.cuda.is_available
    assert module.current_accelerator is torch.accelerator.current_accelerator and module.cuda is torch.version.cuda
    assert (module.replace, module.exists, module.copyfile) == (os.replace, os.path.exists, shutil.copyfile)
    assert not any((module.is_ready(), module.is_available(), module.ready(), module.Interface().ready()))


@pytest.mark.parametrize("gpu", ["T4", "cpu"])
def test_a_module_that_simulate_imports_has_torchs_functions_after_it(imported, monkeypatch, gpu):
    from llmlab.simulation import report

    real, seen = report.build_step, []

    def build_step(*args):
        seen.append((imported(), torch.tensor, torch.get_rng_state))
        return real(*args)

    monkeypatch.setattr(report, "build_step", build_step)
    lab.simulate(SMALL, lab.Training(1, 16), gpu)
    ((module, *patched),) = seen
    assert patched != [torch.tensor, torch.get_rng_state]
    assert (module.tensor, module.get_rng_state) == (torch.tensor, torch.get_rng_state)


SMALL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
         "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}  # fmt: skip
LIBRARIES = """
import os
import shutil
import sys
from types import FunctionType

import llmlab as lab

assert "transformers" not in sys.modules
with lab.simulator("T4"):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaTokenizer, Trainer
    AutoModelForCausalLM.from_config(LlamaConfig(**{sizes}))
    import bitsandbytes  # whose CPU functions are compiled as it is imported: eager ones would stay
    import torch
    assert torch.cuda.is_available()
    bitsandbytes.nn.Linear4bit(64, 64).cuda()(torch.ones(2, 64, device="cuda"))
    from transformers import tokenization_utils_sentencepiece as copying
    assert copying.copyfile is shutil.copyfile
ours = []
for name, module in list(sys.modules.items()):
    for attribute, value in list(getattr(module, "__dict__", {{}}).items()):
        held = list(vars(value).values()) if type(value) is type else [value]
        held = [each.__func__ if type(each) in (staticmethod, classmethod) else each for each in held]
        codes = [each.__code__.co_filename for each in held if type(each) is FunctionType]
        if not name.startswith("llmlab") and any(os.path.join("llmlab", "simulation") in code for code in codes):
            ours.append((name, attribute))
assert copying.copyfile is shutil.copyfile and not ours, ours
assert not torch.cuda.is_available() and "bitsandbytes.backends.cuda.ops" not in sys.modules
assert bitsandbytes.functional.fill.__module__ == bitsandbytes.functional.__name__
"""


def test_transformers_imported_inside_keeps_nothing_of_ours():
    """In a process of its own: in this one it has long been imported."""
    sizes = {name: size for name, size in SMALL.items() if isinstance(size, int)}
    ran = subprocess.run([sys.executable, "-c", LIBRARIES.format(sizes=sizes)], capture_output=True, text=True)
    assert ran.returncode == 0 and "eager" not in ran.stderr, ran.stderr[-2000:]


def test_a_builtin_is_nobodys_patch(tmp_path, monkeypatch):
    """Some module's variable that was `dict` and is None does not make None of all defaults that are `dict`."""
    (tmp_path / "takes_dict.py").write_text("def made(kind=dict):\n    return kind\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "takes_dict", raising=False)
    changing = ModuleType("changing")
    changing.kind = dict
    monkeypatch.setitem(sys.modules, "changing", changing)
    with swept() as look:
        module = importlib.import_module("takes_dict")
        look()
        changing.kind = None
    assert module.made() is dict


def test_a_module_that_would_load_a_driver_is_imported_without_the_gpu(tmp_path, monkeypatch):
    """torch remembers whether Triton has a driver, and would say so after the block as well."""
    seen = []

    @contextmanager
    def hidden():
        seen.append("hidden")
        yield
        seen.append("shown")

    for name in ("asks_for_a_driver", "asks_for_none"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "LOOK_FOR_DRIVERS", {"asks_for_a_driver"})
    monkeypatch.setattr(imports, "forget_answers", seen.append)
    with on_import({"asks_for_none": lambda: seen.append("then")}, hidden):
        importlib.import_module("asks_for_none")
        importlib.import_module("asks_for_a_driver")
    assert seen == ["then", "hidden", "shown", "torch.utils._triton"]
