"""base.compat: the one place for torch's private names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import llmlab
from llmlab.base import compat
from llmlab.base.errors import NotAvailable

PACKAGE = Path(llmlab.__file__).parent
ROOT = Path(__file__).parents[2]
CUDA_ONLY = "torch._C._cuda_clearCublasWorkspaces"  # torch built for CPUs lacks it
# Not private API: operators, and what Python gives every module.
PUBLIC = re.compile(r"torch\.ops\.|torch(\.\w+)*\.__\w+__$")


def dotted(node):
    """Return `a.b.c` for the expression of that form, else None."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def private_names(source):
    """Yield torch's private names in `source`, as attributes and as imports."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node) or ""]
        for name in names:
            if name.startswith("torch.") and not PUBLIC.match(name) and re.search(r"\._", name):
                yield name


def test_private_names_of_torch_are_in_compat_alone():
    files = [path for path in PACKAGE.rglob("*.py") if path != Path(compat.__file__)]
    assert len(files) > 100
    found = {
        (str(path.relative_to(PACKAGE)), name) for path in files for name in private_names(path.read_text("utf-8"))
    }
    assert not found


@pytest.mark.parametrize("line", ["from torch._ops import OpOverload", "import torch._dynamo", "torch._C._x()"])
def test_a_private_name_is_seen(line):
    assert list(private_names(line))


@pytest.mark.parametrize(
    "line", ["torch.ops.aten._to_copy.default", "torch.__version__", "from torch.optim import Adam"]
)
def test_a_public_name_is_not(line):
    assert not list(private_names(line))


@pytest.mark.parametrize("path", ["torch.cuda.memory._gone", "torch._gone.inner"])
def test_a_missing_symbol_is_named_with_the_version(path):
    with pytest.raises(NotAvailable, match=r"torch 2\.\S+ lacks torch\.\S*_gone, .*pip install torch==2"):
        compat.symbol(path)


@pytest.mark.parametrize("gone", ["torch._C._current_graph_task_id", "torch.utils._pytree.arg_tree_leaves"])
def test_a_name_that_is_gone_at_start_up_is_named_with_the_version(gone):
    module, name = gone.rsplit(".", 1)
    code = f"import torch, {module}; del {gone}; import llmlab.base.compat"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert "NotAvailable: torch 2." in last and name in last and "pip install torch==" in last


def test_every_symbol_that_the_source_names_is_there():
    source = "\n".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    paths = set(re.findall(r'symbol\("(torch[\w.]+)"\)', source))
    assert len(paths) > 10
    for path in paths - ({CUDA_ONLY} if torch.version.cuda is None else set()):
        compat.symbol(path)


def test_tested_versions_are_those_of_the_constraints():
    pins = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.M))
    assert {library: pins[library] for library in compat.TESTED} == compat.TESTED
