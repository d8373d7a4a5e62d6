"""torchtitan's mixture of experts in the place of a block's MLP, as Qwen 3 has it in release 0.2.2: no shared experts,
and scores that weigh what the experts returned.

The lines lie beside torchtitan/models/moe/moe.py as it runs.
"""

from __future__ import annotations

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


def forward(share: Share) -> tuple[Kept, ...]:
    """Return what a block's forward holds beside what it keeps where it is highest: forward() has in variables what
    experts were given and returned, and that in the tokens' order, until it returns."""
    sums = Kept("bmm: its output", "temporaries", "h", "fp32", "whole")
    if not share.run.checkpointing:
        return (*_held(share), sums, _of("out_experts", "h"))
    return (
        Kept("h", "temporaries", "h", "stream", "tokens"),
        Kept("gate: its input", "linear inputs", "h", "product", "whole"),
        *_held(share),
        Kept("bmm: what experts returned, in fp32", "mlp", "h", "fp32", "whole", share.spec.experts_per_token),
        sums,
    )


def backward(share: Share, stream: Kept) -> tuple[Height, ...]:
    """Return the moments of the MLP's backward that can be the highest, the block's output having gradient `stream`."""
    chosen, computed = share.spec.experts_per_token, rows(share)
    whole = Kept("gradient of bmm's output", "temporaries", "h", "fp32", "whole")
    again = (*_held(share), Kept("bmm: its output", "temporaries", "h", "fp32", "whole"), _of("out_experts", "h"))
    operators = [row.operator for row in saved(share)]
    copies = operators[-1:]
    at_sum = Height((), (stream, whole, Kept("gradient of bmm's copies", "temporaries", "h", "fp32", "whole", chosen)))
    found = (
        at_sum,
        Height(
            (*copies, "w2: its input"),
            (stream, _of("w2's input, silu and w3", "m", 3 * computed, "heads")),
            EXPERTS[:1],
        ),
        Height(
            (*copies, *operators[6:9]),
            (stream, _of("silu and w1", "m", 2 * computed, "heads"), _of("w3's rows", "h", computed)),
            EXPERTS[:2],
        ),
        Height(
            operators[5:],
            (stream, _of("w1", "m", computed, "heads"), _of("w1's and w3's rows", "h", 2 * computed)),
            EXPERTS,
        ),
    )
    return (Height((), (stream, whole, *again)), *found) if share.run.checkpointing else found


def _of(name: str, width: str, times: float = 1, cut: Cut = "whole") -> Kept:
    return Kept(name, "temporaries", width, "product", cut, times)


def _held(share: Share) -> tuple[Kept, ...]:
    chosen = share.spec.experts_per_token
    return (_of("routed_input", "h", chosen), _of("routed_output", "h", chosen), _of("routed_output_unsorted", "h", chosen))
