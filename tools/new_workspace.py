"""Begin the workspace of an operator: its function in llmlab/simulation/workspaces/, and its line in the table's test.

    python tools/new_workspace.py aten._embedding_bag --file embedding --source cuda/EmbeddingBag.cu

Both are to be completed: the line names the arguments in the place of tensors, and fails until it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from llmlab.simulation.workspaces.none import has_known_workspace
from llmlab.simulation.workspaces.registry import WORKSPACES, name_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER, TEST = Path("llmlab/simulation/workspaces"), Path("tests/simulation/test_workspace_table.py")
FILES = ("normalization", "embedding", "attention", "loss", "copies", "matmul", "reductions", "indexing", "sorting")
FUNCTION = '''

@workspace({operator}, source="{source}")
def {name}(op: Operator, gpu: GPU) -> Iterator[Step]:
    """The C++ function: what it allocates, of {arguments}."""
    yield OUTPUTS
'''


def main(arguments: list[str], root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", help="as aten._embedding_bag or aten.sum.dim_IntList")
    parser.add_argument("--file", required=True, choices=FILES, help="of workspaces/, and the list in the test")
    parser.add_argument("--source", required=True, help="under aten/src/ATen/native, as cuda/EmbeddingBag.cu")
    asked = parser.parse_args(arguments)
    try:
        found = torch.ops.aten
        for part in asked.operator.removeprefix("aten.").split("."):
            found = getattr(found, part)
        func = found if isinstance(found, torch._ops.OpOverload) else found.default
    except AttributeError:
        parser.error(f"torch {torch.__version__} has no operator {asked.operator}")
    if (has := WORKSPACES.get(name_of(func))) is not None:
        parser.error(f"{asked.operator} has a workspace: {has.__qualname__} in {has.__module__}")
    if has_known_workspace(func, ()):
        parser.error(f"{asked.operator} is known to allocate its outputs alone ({FOLDER / 'none.py'})")
    names, name = [each.name for each in func._schema.arguments], func._schema.name.removeprefix("aten::").strip("_")
    module, test = root / FOLDER / f"{asked.file}.py", root / TEST
    said = FUNCTION.format(operator=asked.operator, source=asked.source, name=name, arguments=", ".join(names))
    module.write_text(module.read_text() + said)
    line = f"    Row({asked.operator}, ({''.join(f'{each!r}, ' for each in names).strip()}), []),\n".replace("'", '"')
    before, start, rest = test.read_text().partition(f"\n{asked.file.upper()} = [\n")
    test.write_text(before + start + line + rest)
    print(f"{module.relative_to(root)}: {name}\n{test.relative_to(root)}: {asked.file.upper()}")


if __name__ == "__main__":
    main(sys.argv[1:])
