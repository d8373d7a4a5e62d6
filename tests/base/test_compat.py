"""base.compat: the one place for what llmlab uses of other libraries and a new release may move."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import llmlab
from llmlab.base import compat
from llmlab.base.errors import NotAvailable

PACKAGE = Path(llmlab.__file__).parent
ROOT = Path(__file__).parents[2]
CUDA_ONLY = "torch._C._cuda_clearCublasWorkspaces"  # torch built for CPUs lacks it
LISTED = {f"{place}.{name}" for part in compat.NAMES.values() for place in part for name in part[place].split()}
# Not private API: operators, and what Python gives every module.
PUBLIC = re.compile(r"torch\.ops\.|\w+(\.\w+)*\.__\w+__$")
PYTHONS = {"_asdict", "_exit", "_fields", "_getframe", "_lru_cache_wrapper", "_make", "_replace"}
UNPINNED = {"lightning", "litgpt", "megatron", "triton", "torchtitan", "torchtune"}
# Modules below the top of a library that it documents.
DOCUMENTED = {
    "safetensors.torch.load_file", "safetensors.torch.save_file", "transformers.utils.logging", "triton.language",
}  # fmt: skip
PATCHING = re.compile(r"(mock\.)?(patch|patch\.object|patch\.multiple)|put|getattr|setattr|delattr|hasattr")


def dotted(node, aliases):
    """Return `a.b.c` for the expression of that form, its first name as it was imported, else None."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, aliases)
        return before and f"{before}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else None


def of_a_library(path):
    return path.partition(".")[0] in {*compat.KNOWN, "diffusers", "flash_attn", "peft", "torchao"}


def is_private(path):
    return bool(re.search(r"(^|\.)_[a-zA-Z]", path)) and not PUBLIC.match(path)


def unlisted(source):
    """Yield what `source` uses of other libraries that only base.compat may name: private names of torch and imports
    from inside the others, private attributes of objects, and private names in the strings that patch them."""
    tree = ast.parse(source)
    imported, aliases = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [each.name for each in node.names]
            aliases |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            paths = {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            imported += paths.values()
            aliases |= paths
    for path in filter(of_a_library, imported):
        if path.startswith("torch."):
            known = not is_private(path)  # what is private there, compat imports itself
        else:
            public = path.count(".") < 2 and not is_private(path)
            known = public or path in DOCUMENTED or any(f"{each}.".startswith(f"{path}.") for each in LISTED)
        if not known:
            yield path
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    allowed = {each.rpartition(".")[2] for each in LISTED} | compat.OF_INSTANCES | PYTHONS | own
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = dotted(node, aliases)
            if path and path.startswith("torch."):
                if is_private(path) and path not in LISTED:
                    yield path
            elif is_private(node.attr) and node.attr not in allowed and not is_ours(node.value):
                yield node.attr
        elif isinstance(node, ast.Call) and PATCHING.fullmatch(dotted(node.func, {}) or ""):
            for text in (each.value for each in node.args if isinstance(each, ast.Constant)):
                known = text in LISTED or text in allowed or is_ours(node.args[0])
                if isinstance(text, str) and is_private(text) and not known:
                    yield text


def is_ours(owner):
    text = ast.unparse(owner)
    return text in ("self", "cls", "super()") or text.startswith(("aten", "torch.ops."))


def test_what_may_move_is_named_in_compat_alone():
    files = [path for path in PACKAGE.rglob("*.py") if path != Path(compat.__file__)]
    assert len(files) > 100
    found = {(str(path.relative_to(PACKAGE)), name) for path in files for name in unlisted(path.read_text("utf-8"))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from torch._ops import OpOverload",
        "from torch import _x as y",
        "import torch._dynamo",
        "import torch._dynamo as d",
        "torch._C._x()",
        "import torch as t\nt._C._x()",
        "from torch import nn\nnn.Module._gone",
        "from transformers.models.llama import modeling_llama",
        "from bitsandbytes import _gone",
        "tensor._gone()",
        "mock.patch.object(torch.cuda, '_gone', 1)",
        "mock.patch('torch.cuda._gone')",
        "put('bitsandbytes.functional', '_gone', 1)",
        "getattr(tensor, '_gone')",
    ],
)
def test_what_may_move_is_seen(line):
    assert list(unlisted(line))


@pytest.mark.parametrize("part", compat.NAMES)
def test_what_is_listed_is_there_in_the_installed_release(part):
    library = next(iter(compat.NAMES[part])).partition(".")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    compat.check.__wrapped__(part)


def test_a_part_lacks_no_name_of_its_library():
    assert {place.partition(".")[0] for part in compat.NAMES.values() for place in part} <= compat.KNOWN.keys()


def test_what_is_optional_is_asked_for():
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("simulation/**/*.py"))
    for path in compat.OPTIONAL - LISTED:
        assert path.rpartition(".")[2] in source


def test_a_simulated_card_patches_what_is_listed():
    """Of torch and other libraries it replaces no private name that `check` has not looked for."""
    replaced, real = set(), mock.patch.object

    def note(owner, name, *args, **kwargs):
        replaced.add((getattr(owner, "__module__", None) or owner.__name__, name))
        return real(owner, name, *args, **kwargs)

    with mock.patch.object(mock.patch, "object", note), llmlab.simulator("A100-40GB", world_size=2):
        torch.distributed.init_process_group("nccl")
    private = {
        (module, name) for module, name in replaced
        if of_a_library(module) and is_private(name) and not name.endswith(("_fn", "_implementation"))
    }  # fmt: skip  # flash-attn's are all that transformers' module has of that form
    assert len(private) > 8
    listed = {each.rpartition(".")[2] for each in LISTED}
    for module, name in private:
        assert name in listed or module.startswith("torch.cuda")  # whose functions `has` has looked for


@pytest.mark.parametrize("path", ["torch.cuda.memory._gone", "torch._gone.inner"])
def test_a_missing_symbol_is_named_with_the_version(path):
    with pytest.raises(NotAvailable, match=r"torch 2\.\S+ has no torch\.\S*_gone, .*pip install torch==2"):
        compat.symbol(path)


def test_a_name_that_another_library_lost_is_named_with_its_version(monkeypatch):
    library = pytest.importorskip("safetensors.torch")
    monkeypatch.delattr(library, "safe_open")
    compat.check.cache_clear()
    said = r"safetensors 0\.\S+ has no safetensors\.torch\.safe_open"
    with pytest.raises(NotAvailable, match=said), llmlab.simulator("T4"):
        pass
    compat.check.cache_clear()


def test_only_what_is_optional_may_be_missing(monkeypatch):
    monkeypatch.setattr(compat, "OPTIONAL", frozenset(("torch.cuda._gone",)))
    assert compat.has("torch.cuda.is_available") and not compat.has("torch.cuda._gone")
    with pytest.raises(NotAvailable, match=r"torch\.cuda\._gone_too"):
        compat.has("torch.cuda._gone_too")


def test_a_function_of_torch_cuda_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(torch.cuda, "get_arch_list")
    said = r"torch 2\.\S+ has no torch\.cuda\.get_arch_list"
    with pytest.raises(NotAvailable, match=said), llmlab.simulator("T4"):
        pass


@pytest.mark.parametrize("gone", ["torch._C._current_graph_task_id", "torch.utils._pytree.arg_tree_leaves"])
def test_a_name_that_is_gone_at_start_up_is_named_with_the_version(gone):
    module = gone.rpartition(".")[0]
    code = f"import torch, {module}; del {gone}; import llmlab.base.compat"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert "NotAvailable: torch 2." in last and f"has no {gone}," in last and "pip install torch==" in last


def test_every_symbol_that_the_source_names_is_there():
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    paths = set(re.findall(r'symbol\("([\w.]+)"\)', source)) - ({CUDA_ONLY} if torch.version.cuda is None else set())
    assert len(paths) > 10
    for path in paths:
        if find_spec(path.partition(".")[0]):
            compat.symbol(path)


def test_known_versions_are_those_of_the_constraints():
    text = (ROOT / "constraints.txt").read_text("utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([^\s;]+)", text, re.M))  # the last of a library is for the newest Python
    newest = {library: newest for library, (_, newest) in compat.KNOWN.items() if library not in UNPINNED}
    assert {library: pins[library.replace("_", "-")] for library in newest} == newest


def test_the_floors_are_known():
    floors = dict(re.findall(r'"([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text("utf-8")))
    assert [int(part) for part in floors["torch"].split(".")] == [
        int(part) for part in compat.KNOWN["torch"][0].split(".")[:2]
    ]
