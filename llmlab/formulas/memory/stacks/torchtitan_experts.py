"""torchtitan's mixture of experts, which replaces a block's MLP, as Qwen 3 uses it in release 0.2.2: without shared
experts, and with scores that weigh the experts' outputs.

The lines follow torchtitan/models/moe/moe.py in the order of execution.
"""

from __future__ import annotations

from ..fsdp import own_ranks, own_unit
from ..share import Share
from .described import EXPERTS, Cut, Height, Kept

# models/moe/utils.py, TOKEN_GROUP_ALIGN_SIZE_M: the rows of padding for each expert of the rank, which do not depend on
# the number of its tokens.
PADDING = 8


def rows(share: Share) -> float:
    """Return how many rows the experts of the busiest rank compute for each of its tokens, including padding."""
    return _received(share) + PADDING * share.spec.experts / share.run.ep / share.tokens


def _received(share: Share) -> float:
    return share.spec.experts_per_token * share.run.expert_imbalance


def saved(share: Share) -> tuple[Kept, ...]:
    """Return the lines of router and experts, which are all lines of the block after its second norm."""
    chosen, computed = share.spec.experts_per_token, rows(share)
    # In fp32: the top scores, before and after division by their sum. In 8 bytes: the chosen experts, the choices in
    # the order of the experts, and their tokens.
    names = (3 * 8 + 2 * 4) * chosen + 4
    return (
        Kept("gate: its input", "linear inputs", "h", "product", "whole"),
        Kept("router: softmax's output", "router", "E", "fp32", "whole"),
        Kept("router: who goes where", "router", "1", "byte", "whole", names),
        Kept("_permute: the rows' places", "router", "1", "fp32", "whole", computed),  # in int32
        Kept("w1, w3: their rows", "linear inputs", "h", "product", "whole", computed),
        Kept("silu: w1's output", "mlp", "m", "product", "heads", computed),
        Kept("mul: silu's output", "mlp", "m", "product", "heads", computed),
        Kept("mul: w3's output", "mlp", "m", "product", "heads", computed),
        Kept("w2: its input", "mlp", "m", "product", "heads", computed),
        Kept("bmm: what experts returned, in fp32", "mlp", "h", "fp32", "whole", chosen),
    )


SELECTIVE = (Kept("mm 5: gate", "made again", "E", "product", "whole"),)


def forward(share: Share) -> tuple[Height, ...]:
    """Return the moments of a block's forward pass that can be its peak. Until forward() returns, its variables refer
    to the experts' inputs and outputs, and to the outputs in the order of the tokens."""
    chosen = share.spec.experts_per_token
    sums, last = Kept("bmm: its output", "temporaries", "h", "fp32", "whole"), "bmm: what experts returned, in fp32"
    rows: tuple[Kept, ...] = ()
    if share.recomputes_last:
        rows = (
            Kept("h", "temporaries", "h", "stream", "tokens"),
            Kept("gate: its input", "linear inputs", "h", "product", "whole"),
        )
        heights = [Height((), (*rows, *_held(share), Kept(last, "mlp", "h", "fp32", "whole", chosen), sums))]
    else:
        heights = [Height((), (*_held(share), sums, _of("out_experts", "h")))]
    if own_unit(share.run):
        # With zero=2, the weights of all blocks stay gathered, and these count with them.
        heights.append(Height((last,), (*rows, *_sending(share), _weights(share, share.run.zero == 3))))
    return tuple(heights)


def _sending(share: Share) -> tuple[Kept, ...]:
    """Return the tensors, in addition to weights, that exist while an expert group's ranks send back the experts'
    outputs."""
    chosen = share.spec.experts_per_token
    return (
        *_held(share)[:2],
        _of("w2: its output", "h", rows(share)),
        _of("_unpermute: its output", "h", _received(share)),
        _of("all_to_all: its output", "h", chosen),
    )


def backward(share: Share, stream: Kept) -> tuple[Height, ...]:
    """Return the moments of the MLP's backward pass that can be its peak. `stream`: the gradient of the block's
    output."""
    run, chosen, computed = share.run, share.spec.experts_per_token, rows(share)
    # In compiled code, one kernel reads the gradient of w2's input and writes those of w1 and w3.
    fused = run.compile
    whole = Kept("gradient of bmm's output", "temporaries", "h", "fp32", "whole")
    # Until then, selective checkpointing keeps the sum over tensor-parallel ranks.
    summed = run.tp > 1 and run.checkpointing == "selective"
    again = (
        *_held(share),
        Kept("bmm: its output", "temporaries", "h", "fp32", "whole"),
        _of("out_experts", "h"),
        Kept("reduce_scatter: moe", "temporaries", "h", "product", "tokens", summed),
    )
    operators = tuple(row.operator for row in saved(share))
    copies = operators[-1:]
    # FSDP2 prefetches weights, except on one rank, where it casts them when they are needed. With zero=2, all weights
    # stay.
    own = own_unit(run)
    there = (_weights(share),) if own else ()
    ahead = there if run.checkpointing or own_ranks(run) > 1 or run.zero == 2 else ()
    of_copies = Kept("gradient of bmm's copies", "temporaries", "h", "fp32", "whole", chosen)
    heights = [
        Height((), (stream, *ahead, whole, of_copies)),
        Height(
            (*copies, "w2: its input"),
            (stream, *there, _of("w2's input, silu and w3", "m", (3 - fused) * computed, "heads")),
            EXPERTS[:1],
        ),
        Height(
            (*operators[6 - fused : 9], *copies),
            (stream, *there, _of("silu and w1", "m", 2 * computed, "heads"), _of("w3's rows", "h", computed)),
            EXPERTS[:2],
        ),
        Height(
            operators[5:],
            (stream, *there, _of("w1", "m", computed, "heads"), _of("w1's and w3's rows", "h", (2 - fused) * computed)),
            EXPERTS,
        ),
    ]
    if run.checkpointing:
        heights.append(Height((), (stream, *ahead, whole, *again)))
    if run.checkpointing and own:  # the output of the all-gather, too, until the experts have returned
        output = _weights(share, own_ranks(run) > 1 and run.zero == 3)
        heights.append(Height(copies, (stream, whole, *_sending(share), *there, output)))
    if own:
        heights.append(Height(operators[1:], (stream, _of("routed_input", "h", chosen), reduced(share, True))))
    return tuple(heights)


def _weights(share: Share, times: float = 1) -> Kept:
    """Return the experts' gathered weights in 16 bits, `times` times."""
    spec = share.spec
    elements = 3 * spec.experts // share.run.ep * spec.hidden * spec.moe_intermediate
    return Kept("experts: their weights", "temporaries", "1", "product", "heads", times * elements / share.tokens)


def reduced(share: Share, now: bool = False) -> Kept:
    """Return the fp32 copy of the experts' gradients that FSDP2 reduces, which stays until the next reduction, and the
    reduced gradients.

    `now`: during this reduction. Its peak comes either before the reduced gradients exist, or after them, when all
    other gradients have been freed except the last one, to which a variable refers. On one rank, there is a quotient in
    addition (_fsdp_collectives.py, foreach_reduce).
    """
    ranks = own_ranks(share.run)
    stays = 2 / ranks
    return _weights(share, 2 + (max(1, stays + (1 / 3 if ranks > 1 else 2)) if now else stays))


def _of(name: str, width: str, times: float = 1, cut: Cut = "whole") -> Kept:
    return Kept(name, "temporaries", width, "product", cut, times)


def _held(share: Share) -> tuple[Kept, ...]:
    """Return the tensors to which variables of forward() refer; with tensor parallelism also the norm's output before
    it is gathered."""
    chosen = share.spec.experts_per_token
    return (
        Kept("ffn_norm: its output", "temporaries", "h", "product", "tokens", share.run.tp > 1),
        _of("routed_input", "h", chosen),
        _of("routed_output", "h", chosen),
        _of("routed_output_unsorted", "h", chosen),
    )
