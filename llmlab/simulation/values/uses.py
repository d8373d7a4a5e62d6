"""How code uses an integer that it reads from the GPU: as a value, for which a placeholder is enough, or as a size.

`int(x)` returns a plain number, whose origin cannot be seen later. So the source code decides: the number is followed
from the expression that reads it outwards and, by variable name, through the function around it. A number that is
shown, stored, compared or looked up is a value. One that reaches a slice, an unknown call or the function's caller may
be a size.
"""

from __future__ import annotations

import ast
import dis
import linecache
from functools import cache
from itertools import islice
from types import FrameType
from typing import Any

# Calls that store or show their arguments, and calls that pass them on.
KEEPS = frozenset((
    "add", "add_scalar", "append", "array", "as_tensor", "bool", "chr", "convert_ids_to_tokens", "critical", "debug",
    "decode", "dumps", "error", "exception", "format", "get", "hash", "id_to_token", "info", "isfinite", "isinf",
    "isinstance", "isnan", "join", "log", "log_metric", "log_metrics", "print", "put", "repr", "set_description",
    "set_postfix", "set_postfix_str", "setdefault", "str", "tensor", "update", "warning", "write", "writerow",
))  # fmt: skip
GIVES_ON = frozenset((
    "abs", "ceil", "dict", "divmod", "float", "floor", "int", "len", "list", "max", "min", "round", "set", "sorted",
    "sum", "trunc", "tuple",
))  # fmt: skip
CONTAINERS = (ast.Tuple, ast.List, ast.Set, ast.Starred, ast.ListComp, ast.SetComp, ast.GeneratorExp)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)


def is_only_a_value(frame: FrameType) -> bool:
    """Return whether the source shows that the number read by the running instruction of `frame` is not a size."""
    expression = _node(frame)
    if expression is None:
        return False
    node, source = expression
    if isinstance(node, ast.Subscript):  # names[number]; a slice's end is a size
        return not any(isinstance(part, ast.Slice) for part in ast.walk(node.slice))
    if isinstance(node, ast.BinOp):  # "%d" % number
        return isinstance(node.op, ast.Mod) and _is_text(node.left)
    if not isinstance(node, ast.Call) or _name(node) not in KEEPS | GIVES_ON:
        return isinstance(node, (ast.FormattedValue, ast.JoinedStr))
    return _name(node) in KEEPS or source.ends_as_value(node, set())


def is_only_checked(frame: FrameType) -> bool:
    """Return whether the tensor that the running call of `frame` returns is only counted, or compared to decide a
    branch, as torchmetrics does to see whether labels are classes."""
    expression = _node(frame)
    return expression is not None and isinstance(expression[0], ast.Call) and expression[1].ends_as_check(expression[0])


def asserted(frame: FrameType) -> bool | None:
    """Return the truth value with which the assertion that `frame` runs holds; None if it runs no assertion."""
    code = [instruction for instruction in dis.get_instructions(frame.f_code) if instruction.opname != "TO_BOOL"]
    here = max(place for place, instruction in enumerate(code) if instruction.offset <= frame.f_lasti)
    for place, jump in enumerate(code[here : here + 2], here):
        if "JUMP" in jump.opname and "_IF_" in jump.opname:
            raises = {instruction.offset for instruction in code if instruction.opname == "LOAD_ASSERTION_ERROR"}
            if jump.argval in raises or code[place + 1].offset in raises:
                return ("TRUE" in jump.opname) is not (jump.argval in raises)
    return None


def decides_loop(frame: FrameType) -> bool:
    """Return whether the running expression belongs to the condition of a `while` loop."""
    expression = _node(frame)
    if expression is None:
        return False
    node, source = expression
    while isinstance(node, ast.expr):  # a jump back has the position of the whole statement
        node = source.around[node]
    return isinstance(node, ast.While)


class _Source:
    """The syntax nodes of a file, each with its parent."""

    def __init__(self, tree: ast.Module) -> None:
        self.around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.at = {
            (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset): node
            for node in self.around
            if isinstance(node, (ast.expr, ast.While))
        }

    def ends_as_value(self, node: ast.AST, seen: set[tuple[ast.AST, str]]) -> bool:
        """Whether the result of `node`, followed outwards, is used only as a value; `seen`: names already followed."""
        outer = self.around[node]
        if isinstance(outer, (ast.FormattedValue, ast.Compare, ast.Assert, ast.Expr, ast.Dict)):
            return True
        if isinstance(outer, (ast.If, ast.While, ast.IfExp)) and node is outer.test:
            return True
        if isinstance(outer, ast.comprehension):
            return node is not outer.iter
        if isinstance(outer, ast.Subscript):
            return node is outer.slice or self.ends_as_value(outer, seen)
        if isinstance(outer, ast.BinOp):
            if isinstance(outer.op, ast.Div) or (isinstance(outer.op, ast.Mod) and _is_text(outer.left)):
                return True
            if any(isinstance(side, (ast.List, ast.Tuple)) for side in (outer.left, outer.right)):
                return False
        elif isinstance(outer, ast.keyword):
            outer = self.around[outer]
        if isinstance(outer, ast.Call):
            name = _name(outer)
            return name in KEEPS or (name in GIVES_ON and self.ends_as_value(outer, seen))
        if isinstance(outer, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
            parts = (node for target in targets for node in ast.walk(target))
            names = {node.id for node in parts if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            constant = all(self._name_is_value(outer, name, seen) for name in names)
            return constant and (not isinstance(outer, ast.NamedExpr) or self.ends_as_value(outer, seen))
        return isinstance(outer, (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp, *CONTAINERS)) and self.ends_as_value(
            outer, seen
        )

    def ends_as_check(self, node: ast.AST) -> bool:
        """Whether only a tensor's length, its number of elements, or the truth of a comparison is used, as a value."""
        outer = self.around[node]
        if isinstance(outer, ast.Attribute):
            return outer.attr in ("numel", "any", "all") and self.ends_as_value(self.around[outer], set())
        if isinstance(outer, ast.Call):
            return _name(outer) in ("len", "any", "all") and self.ends_as_value(outer, set())
        if isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
            return all(self.ends_as_check(use) for use in self._uses(outer, outer.targets[0].id))
        return isinstance(outer, ast.FormattedValue) or (
            isinstance(outer, (ast.Compare, ast.BinOp, ast.UnaryOp)) and self.ends_as_check(outer)
        )

    def _uses(self, node: ast.AST, name: str) -> list[ast.Name]:
        scope = node
        while not isinstance(scope, SCOPES):
            scope = self.around[scope]
        uses = (node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name)
        return [use for use in uses if isinstance(use.ctx, ast.Load)]

    def _name_is_value(self, node: ast.AST, name: str, seen: set[tuple[ast.AST, str]]) -> bool:
        if (node, name) in seen:
            return True
        seen.add((node, name))
        return all(self.ends_as_value(use, seen) for use in self._uses(node, name))


def _node(frame: FrameType) -> tuple[ast.AST, _Source] | None:
    """Return the expression or the `while` that runs in `frame`; None before Python 3.11, which has no positions, or
    without source code."""
    code = frame.f_code
    positions: Any = getattr(code, "co_positions", None)
    source = _source(code.co_filename) if positions else None
    if source is None:
        return None
    begin, end, first, last = next(islice(positions(), frame.f_lasti // 2, None))
    node = source.at.get((begin, end, first, last))
    return None if node is None else (node, source)


@cache
def _source(file: str) -> _Source | None:
    try:
        return _Source(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):
        return None


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", None) or getattr(call.func, "id", ""))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
