"""A stack's block as data: one line for each tensor that one of its operators saves, to compare with the stack's
source.

    h  hidden    f  MLP width    Q  heads × head_dim    K  kv_heads × head_dim    H  heads    G  kv_heads
    D  head_dim    V  vocabulary    S  scores: heads × seq_len    1  one    E  experts    m  expert MLP width

Hugging Face's classes, which come in many families, are described by code: activations.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ....specs.model import ModelSpec
from ..share import Share, adapted

EXPERTS = ("experts.down_proj", "experts.up_proj", "experts.gate_proj")  # matrices of all experts of a rank
Cut = Literal["heads", "tokens", "whole"]


class Saved(NamedTuple):
    """Bytes of one kind that one block saves, before tensor parallelism divides them.

    `cut`: the ranks that divide them. "heads": those of tensor parallelism. "tokens": the same, but only with sequence
    parallelism. "whole": none, because each rank has gathered them.
    """

    kind: str
    bytes: int
    cut: Cut = "heads"


class Kept(NamedTuple):
    """A tensor that stays from the forward to the backward pass, or that lives during a `Height`: the operator that
    saves it, the kind under which it is reported, its `times` × `width` elements per token, their dtype, and the ranks
    that divide them (see `Saved`)."""

    operator: str
    kind: str
    width: str
    dtype: Literal["stream", "product", "fp32", "byte"]
    cut: Cut
    times: float = 1


class Loss(NamedTuple):
    """Copies of the logits at four times: in the dtype of matmuls, and in fp32."""

    forward: tuple[float, float]  # while the loss is computed
    gradient: tuple[float, float]  # while the logits' gradient is computed
    head: tuple[float, float]  # while the gradient of the head's weight is computed
    after: tuple[float, float]  # from then on


class Height(NamedTuple):
    """A moment of a block's backward or forward pass that can be its peak.

    `gone`: the operators in `Block.saved` whose tensors have been freed or do not exist yet. `beside`: additional
    tensors. `gradients`: the linear layers whose weights have a gradient by then (`specs.parameters.Linear`,
    `EXPERTS`).
    """

    gone: tuple[str, ...]  # operators
    beside: tuple[Kept, ...]
    gradients: tuple[str, ...] = ()


class Block(NamedTuple):
    """A stack's block and the layers around it, with the file from which the lines were read."""

    source: str
    saved: tuple[Kept, ...]  # by autograd, without recomputation
    selective: tuple[Kept, ...]  # by selective checkpointing, in addition to the block's inputs
    outside: tuple[Kept, ...]  # saved outside the blocks, on the stage with the head
    backward: tuple[Height, ...]  # a recomputed block has all its saved tensors again
    loss: Loss
    forward: tuple[Height, ...] = ()  # if a block has more temporaries than at its end
    arguments: tuple[Kept, ...] = ()  # of the block in addition to its input; every kind of checkpointing saves them
    norm_backward: tuple[Kept, ...] = ()  # temporaries at the peak of the final norm's backward pass
    table: int = 0  # bytes of the table for rotary positions, one for all layers


def saved(rows: tuple[Kept, ...], share: Share) -> list[Saved]:
    """Return the bytes of each line for this rank's tokens."""
    element = {"stream": share.bytes.residual, "product": share.bytes.compute, "fp32": 4, "byte": 1}
    width = widths(share.spec, share.run.seq_len)
    return [
        Saved(row.kind, int(share.tokens * row.times * width[row.width]) * element[row.dtype], row.cut) for row in rows
    ]


def widths(spec: ModelSpec, seq_len: int) -> dict[str, int]:
    """Return the number of elements per token for each letter of a description."""
    return {
        "h": spec.hidden, "f": spec.intermediate, "Q": spec.query_width, "K": spec.key_width, "H": spec.heads,
        "G": spec.kv_heads, "D": spec.head_dim, "V": spec.vocab, "S": spec.heads * seq_len, "1": 1,
        "E": spec.experts, "m": spec.moe_intermediate,
    }  # fmt: skip


def read(
    share: Share, operator: str, kind: str, width: str, *linears: str, calls: int | None = None
) -> tuple[Kept, ...]:
    """Return the lines for a tensor that `linears` read: the tensor itself if their weights are trained, otherwise the
    tensors that their adapters read. With dropout, an adapter reads another tensor and saves a mask. Both are counted
    once for each of `calls`, or, if it is None, for each adapter."""
    run, names = share.run, {linear.name for linear in adapted(share.spec, share.run)}.intersection(linears)
    if run.lora is None or not run.lora.dropout:
        return (Kept(operator, kind, width, "product", "whole", run.lora is None or bool(names)),)
    times = len(names) if calls is None else calls * bool(names)
    return (Kept(f"{operator}, dropped out", kind, width, "product", "whole", times),
            Kept(f"{operator}, the mask", kind, width, "byte", "whole", times))  # fmt: skip


def before_adapters(block: Block) -> tuple[Kept, ...]:
    """Return the lines that the first block does not save if only adapters are trained, and its queries, keys or values
    have some: the lines before these layers, and the masks of their dropout, which would only pass a gradient to
    those."""
    first = next(number for number, row in enumerate(block.saved) if row.kind == "linear inputs")
    masks = [row for row in block.saved[first : first + 2] if row.dtype == "byte"]
    return (*block.saved[:first], *masks)


def by_kind(rows: list[Saved], tp: int, sequence_parallel: bool) -> dict[str, int]:
    """Return the bytes by kind on one tensor-parallel rank."""
    kinds: dict[str, int] = {}
    for kind, size, cut in rows:
        divided = cut == "heads" or (cut == "tokens" and sequence_parallel)
        kinds[kind] = kinds.get(kind, 0) + size // (tp if divided else 1)
    return kinds
