"""A stack's block as data: one line for each tensor that an operator of it keeps, to lay beside the stack's source.

    h  hidden    f  MLP width    Q  heads × head_dim    K  kv_heads × head_dim    H  heads    G  kv_heads
    D  head_dim    V  vocabulary    S  scores: heads × seq_len    1  one

The description of Hugging Face's classes, which come in many families, is code: activations.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ....specs.model import ModelSpec
from ..share import Share, adapted

EXPERTS = ("experts.down_proj", "experts.up_proj", "experts.gate_proj")  # matrices of all a rank's experts
Cut = Literal["heads", "tokens", "whole"]


class Saved(NamedTuple):
    """Bytes of one kind that one block keeps, before tensor parallelism.

    `cut` is what divides them: "heads" tensor parallelism; "tokens" only with sequence parallelism; "whole" nothing,
    because each rank has gathered them.
    """

    kind: str
    bytes: int
    cut: Cut = "heads"


class Kept(NamedTuple):
    """A tensor that stays from forward to backward: which operator keeps it, under which kind it is reported, its
    `times` × `width` elements for each token, their dtype, and what divides them (see `Saved`)."""

    operator: str
    kind: str
    width: str
    dtype: Literal["stream", "product", "fp32", "byte"]
    cut: Cut
    times: float = 1


class Loss(NamedTuple):
    """Copies of the logits at four moments: in the products' dtype, and in fp32."""

    forward: tuple[float, float]  # as the loss is computed
    gradient: tuple[float, float]  # as the logits' gradient is made
    head: tuple[float, float]  # as the gradient of the head's weight is made
    after: tuple[float, float]  # from then on


class Height(NamedTuple):
    """A moment of a block's backward, or of its forward, that can be its highest: what of `Block.saved` is gone, or not
    there yet, what is there beside it, and the linears whose weights have a gradient by then
    (`specs.parameters.Linear`, `EXPERTS`)."""

    gone: tuple[str, ...]  # operators
    beside: tuple[Kept, ...]
    gradients: tuple[str, ...] = ()


class Block(NamedTuple):
    """A stack's block and what is around it, with the file that the lines were read from."""

    source: str
    saved: tuple[Kept, ...]  # by autograd, where nothing is recomputed
    selective: tuple[Kept, ...]  # by selective checkpointing, beside what the block is given
    outside: tuple[Kept, ...]  # of blocks, on the stage with the head
    backward: tuple[Height, ...]  # in which a block that was recomputed has all again that is saved
    loss: Loss
    forward: tuple[Height, ...] = ()  # where a block has more, beside what is kept, than when it is over
    arguments: tuple[Kept, ...] = ()  # to the block beside its input: all checkpointing keeps it
    norm_backward: tuple[Kept, ...] = ()  # beside what was saved, as the final norm's backward is at its highest
    table: int = 0  # bytes of the table by which positions rotate, one for all layers


def saved(rows: tuple[Kept, ...], share: Share) -> list[Saved]:
    """Return the bytes of each line for this rank's tokens."""
    element = {"stream": share.bytes.residual, "product": share.bytes.compute, "fp32": 4, "byte": 1}
    width = widths(share.spec, share.run.seq_len)
    return [
        Saved(row.kind, int(share.tokens * row.times * width[row.width]) * element[row.dtype], row.cut) for row in rows
    ]


def widths(spec: ModelSpec, seq_len: int) -> dict[str, int]:
    """Return the elements per token that the letters of a description stand for."""
    return {
        "h": spec.hidden, "f": spec.intermediate, "Q": spec.query_width, "K": spec.key_width, "H": spec.heads,
        "G": spec.kv_heads, "D": spec.head_dim, "V": spec.vocab, "S": spec.heads * seq_len, "1": 1,
        "E": spec.experts, "m": spec.moe_intermediate,
    }  # fmt: skip


def read(
    share: Share, operator: str, kind: str, width: str, *linears: str, calls: int | None = None
) -> tuple[Kept, ...]:
    """Return what stays of a tensor that `linears` read: itself where their weights are trained, or else what their
    adapters read; with dropout that is another tensor in each of `calls`, None one of each adapter, and its mask."""
    run, names = share.run, {linear.name for linear in adapted(share.spec, share.run)}.intersection(linears)
    if run.lora is None or not run.lora.dropout:
        return (Kept(operator, kind, width, "product", "whole", run.lora is None or bool(names)),)
    times = len(names) if calls is None else calls * bool(names)
    return (Kept(f"{operator}, dropped out", kind, width, "product", "whole", times),
            Kept(f"{operator}, the mask", kind, width, "byte", "whole", times))  # fmt: skip


def before_adapters(block: Block) -> tuple[Kept, ...]:
    """Return the lines that a first block does not keep whose queries, keys or values have adapters, and alone are
    trained: of what is before these, and the masks of their dropout, which would take a gradient to that."""
    first = next(number for number, row in enumerate(block.saved) if row.kind == "linear inputs")
    masks = [row for row in block.saved[first : first + 2] if row.dtype == "byte"]
    return (*block.saved[:first], *masks)


def by_kind(rows: list[Saved], tp: int, sequence_parallel: bool) -> dict[str, int]:
    """Return bytes by kind on one tensor-parallel rank."""
    kinds: dict[str, int] = {}
    for kind, size, cut in rows:
        divided = cut == "heads" or (cut == "tokens" and sequence_parallel)
        kinds[kind] = kinds.get(kind, 0) + size // (tp if divided else 1)
    return kinds
