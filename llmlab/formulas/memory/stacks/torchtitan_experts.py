"""torchtitan's mixture of experts in the place of a block's MLP, as Qwen 3 has it in release 0.2.2: no shared experts,
and scores that weigh what the experts returned.

The lines lie beside torchtitan/models/moe/moe.py as it runs.
"""

from __future__ import annotations

from ..fsdp import own_ranks, own_unit
from ..share import Share
from .described import EXPERTS, Cut, Height, Kept

# models/moe/utils.py, TOKEN_GROUP_ALIGN_SIZE_M: what each expert's tokens are padded for, once for each expert of the
# rank, whatever the counts.
PADDING = 8


def rows(share: Share) -> float:
    """Return how many rows a rank's experts compute for each of its tokens, padding among them, ranks equally loaded.

    An expert group's ranks send each other as many as they have.
    """
    spec = share.spec
    return spec.experts_per_token + PADDING * spec.experts / share.run.ep / share.tokens


def saved(share: Share) -> tuple[Kept, ...]:
    """Return what router and experts keep for backward, which is all of the block's from its second norm's output on.
    """
    chosen, computed = share.spec.experts_per_token, rows(share)
    # In fp32 the top scores, before and after they are divided by their sum; in 8 bytes which experts these are, the
    # chosen in the experts' order, and whose tokens they are.
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
    """Return the moments of a block's forward that can be the highest: forward() has in variables what experts were
    given and returned, and that in the tokens' order, until it returns."""
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
        # With zero=2 the weights are not the block's alone.
        heights.append(Height((last,), (*rows, *_sending(share), _weights(share, share.run.zero == 3))))
    return tuple(heights)


def _sending(share: Share) -> tuple[Kept, ...]:
    """Return what is there as an expert group's ranks send back what the experts returned, beside their weights."""
    chosen = share.spec.experts_per_token
    return (
        *_held(share)[:2],
        _of("w2: its output", "h", rows(share)),
        _of("_unpermute: its output", "h", chosen),
        _of("all_to_all: its output", "h", chosen),
    )


def backward(share: Share, stream: Kept) -> tuple[Height, ...]:
    """Return the moments of the MLP's backward that can be the highest, the block's output having gradient `stream`."""
    run, chosen, computed = share.run, share.spec.experts_per_token, rows(share)
    # Compiled, one kernel reads the gradient of w2's input and writes those of w1 and w3.
    fused = run.compile
    whole = Kept("gradient of bmm's output", "temporaries", "h", "fp32", "whole")
    # Until it comes to that, selective checkpointing has what the ranks of tensor parallelism summed.
    summed = run.tp > 1 and run.checkpointing == "selective"
    again = (
        *_held(share),
        Kept("bmm: its output", "temporaries", "h", "fp32", "whole"),
        _of("out_experts", "h"),
        Kept("reduce_scatter: moe", "temporaries", "h", "product", "tokens", summed),
    )
    operators = tuple(row.operator for row in saved(share))
    copies = operators[-1:]
    # FSDP2 gathers weights ahead, but from one rank, of which it casts them as they are needed; with zero=2 all stay.
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
    """The experts' weights as they are gathered, in half precision."""
    spec = share.spec
    elements = 3 * spec.experts // share.run.ep * spec.hidden * spec.moe_intermediate
    return Kept("experts: their weights", "temporaries", "1", "product", "heads", times * elements / share.tokens)


def reduced(share: Share, now: bool = False) -> Kept:
    """What FSDP2 reduces the experts' gradients from, in fp32, until it reduces others, and what of them stays.

    `now`: as it does so. They are gone by then, but for the last, which a variable has; or are there, but what stays is
    not. Of one rank there is a quotient beside it (_fsdp_collectives.py, foreach_reduce).
    """
    ranks = own_ranks(share.run)
    stays = 2 / ranks
    return _weights(share, 2 + (max(1, stays + (1 / 3 if ranks > 1 else 2)) if now else stays))


def _of(name: str, width: str, times: float = 1, cut: Cut = "whole") -> Kept:
    return Kept(name, "temporaries", width, "product", cut, times)


def _held(share: Share) -> tuple[Kept, ...]:
    """Return what forward() has in variables; with tensor parallelism also the norm's output, which was gathered."""
    chosen = share.spec.experts_per_token
    return (
        Kept("ffn_norm: its output", "temporaries", "h", "product", "tokens", share.run.tp > 1),
        _of("routed_input", "h", chosen),
        _of("routed_output", "h", chosen),
        _of("routed_output_unsorted", "h", chosen),
    )
