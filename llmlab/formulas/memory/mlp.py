"""The temporaries of an eager gated MLP of transformers, moment by moment, also with adapters and quantized weights.

Widths are bytes per token and element of the MLP's width:

    o  output of a linear layer     s  outputs of adapters     a  peft's cast of their inputs
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import gptq
from .activations import adapters_drop, adapters_stream, copies_input
from .share import Share, adapted, adapter_bytes, by_bitsandbytes, unpacked_bytes

BEHIND = 3  # the place of down_proj, behind the activation


@dataclass(frozen=True)
class Mlp:
    """The widths of one MLP."""

    share: Share
    names: frozenset[str]  # of its linears that have an adapter
    one: bool  # whether both branches are one linear's, gate_up_proj's
    o: int
    s: int
    a: int
    drops: bool

    @property
    def down(self) -> bool:
        return "down_proj" in self.names

    @property
    def stays(self) -> int:
        """The width of down_proj's input in the context of an int8 layer (autograd/_functions.py, MatMul8bitLt)."""
        return self.o if self.share.run.quantization == "int8" and self.share.run.lora else 0

    @property
    def own(self) -> int:
        """The width that down_proj's adapter saves in addition: its input, or the output and the mask of its
        dropout."""
        if not self.down:
            return 0
        if self.drops:
            return self.s + self.share.mask_bytes
        return self.s if copies_input(self.share, BEHIND) or not self.stays else 0

    def adapter(self, keeps: bool) -> tuple[int, int]:
        """The widths of down_proj's adapter's copies of its input, at its beginning and after its first matmul;
        `keeps`: whether the block saves activations for autograd."""
        run = self.share.run
        if not self.down or not (self.drops or copies_input(self.share, BEHIND)):
            return 0, 0
        cast = self.a if self.a != self.o and not (by_bitsandbytes(run) and self.share.autocast) else 0
        if not self.drops and not self.share.autocast:
            return cast, cast
        dropped = self.a + self.share.mask_bytes if self.drops else 0
        return cast + dropped + (self.s if self.share.autocast else 0), cast + self.own * keeps

    def matmul(self, outputs: int) -> tuple[int, int]:
        """The temporaries and output of a branch's matmul with `outputs` widths: in widths, and in bytes of a weight.

        int8 returns int32, then 16 bits, then the dtype of its input (workspaces/bitsandbytes.py). NF4 returns 16 bits,
        then casts.
        """
        if not by_bitsandbytes(self.share.run):
            return outputs * self.o, 0
        if self.stays:
            return outputs * (4 + (2 if self.o == 4 else 0) + self.o), 0
        return outputs * (self.o + (2 if self.o == 4 else 0)), 2 * outputs


def mlp_of(share: Share) -> Mlp | None:
    """Return the widths of a dense gated MLP that is not compiled; None for another."""
    spec, run = share.spec, share.run
    if not spec.gated or spec.experts or share.blocks_compiled:
        return None
    names = frozenset(linear.name for linear in adapted(spec, run) if linear.part == "mlp")
    one = any(linear.name == "gate_up_proj" for linear in spec.block_linears)
    s = adapters_stream(share)
    a = s if run.precision.startswith("mixed") or not run.lora else adapter_bytes(run)
    return Mlp(share, names, one, share.linear_bytes, s, a, adapters_drop(share))


def in_forward(mlp: Mlp, checkpointing: str | None, again: bool = False, waiting: int = 0) -> int:
    """Return the temporaries at the peak of the MLP's forward pass, in addition to what the block saves.

    With `again`, the block is recomputed. The recomputation stops at the last tensor that the backward pass needs, so
    it leaves out down_proj's matmul and the second matmul of its adapter. `waiting`: a width in addition to the last
    branch's output.
    """
    share, o, s = mlp.share, mlp.o, mlp.s
    spec, run = share.spec, share.run
    f, h, quantized = spec.intermediate, spec.hidden, by_bitsandbytes(run)
    branches = 2 if mlp.one else 1
    adapters = {name: name in mlp.names for name in ("gate_proj", "up_proj", "gate_up_proj")}
    of_branches = (2 - share.fuses) * o if checkpointing is None else 0  # besides act's output
    products = 0  # what selective checkpointing keeps of the branches' products
    if checkpointing == "selective":
        products = (0 if quantized else 2 * o) + s * sum(adapters.values()) * branches
    saved_bytes = (of_branches + o if checkpointing is None else products) + mlp.stays
    saved_bytes += mlp.own if checkpointing is None else 0
    # During the last branch, the activation function's output exists, and its input if it is saved.
    there = 0 if mlp.one else o * (2 - share.fuses if checkpointing is None else 1) + products // 2
    width, weight = mlp.matmul(branches)
    chain = branches * (o + 2 * s)  # an adapter's output, the scaled output, and the layer's
    width += waiting
    last = max(width, chain * any(adapters.values())) if mlp.one else max(width, chain * adapters["up_proj"])
    # The copy of the last branch's adapter's input, if it is not saved.
    copied = mlp.a * h if mlp.a != share.bytes.residual and (mlp.drops or checkpointing) else 0
    copied *= bool(mlp.names - {"down_proj", "gate_proj"})
    moments = [share.tokens * (f * (there + last) + copied)]
    if weight:
        moments.append(share.tokens * f * (there + 2 * branches) + weight * h * f)
    if adapters["gate_proj"]:
        moments.append(share.tokens * f * chain)
    # down_proj reads the product of the branches. The branches have been freed, unless they are saved.
    live = (of_branches + o if checkpointing is None else products) + o
    moments.append(share.tokens * f * (live + (0 if checkpointing is None else 2 * o - min(products, 2 * o))))
    if mlp.stays and (mlp.down or not again):  # int8's copy in half, absolute values, which are outliers, and quantized
        moments.append(share.tokens * f * (live + 6))
    elif quantized and (mlp.down or not again):
        moments.append(share.tokens * f * (live + 2 * (o == 4)) + 2 * h * f)
    elif run.quantization == "gptq":
        moments += _unpacking(mlp, branches, there, live, checkpointing is None)
    if mlp.down:
        begins, then = mlp.adapter(checkpointing is None)
        moments.append(share.tokens * (f * (live + begins) + h * o))
        if not again:
            moments.append(share.tokens * (f * (live + then) + h * (2 * s + o)))
    # The input of both branches, and, with a 16-bit stream, the fp32 copy that the norm saves.
    read = share.tokens * h * share.bytes.residual
    shares = bool(mlp.names - {"down_proj"}) and not (mlp.drops or copies_input(share, 2))
    kept_too = mlp.stays or (checkpointing is None and (run.lora is None or shares))
    streams = read * (not kept_too) + read * (share.bytes.residual == 2)
    # And the embedding's output, to which a variable of the model's forward refers.
    streams += read if run.lora and checkpointing is None and not again else 0
    return max(0, max(moments) - share.tokens * f * saved_bytes) // run.tp + streams


def _unpacking(mlp: Mlp, branches: int, there: int, live: int, saves_all: bool) -> list[int]:
    """Return the bytes around the matmuls of GPTQ's last branch and of down_proj, in addition to `there` and `live`
    widths: while each weight is unpacked, and after its matmul. The unpacked weights that autograd saves (`saves_all`)
    count elsewhere, even before they are unpacked."""
    share, spec, widths = mlp.share, mlp.share.spec, unpacked_bytes(mlp.share.run)
    tokens, f, weight = share.tokens, spec.intermediate, spec.hidden * spec.intermediate
    own = share.bytes.compute * weight * saves_all
    unpacks, reads = gptq.highest(*widths) * weight, gptq.read(*widths) * weight
    last = [tokens * f * there + branches * unpacks, tokens * f * (there + branches * mlp.o) + branches * reads]
    down = [tokens * f * live + unpacks, tokens * (f * live + spec.hidden * mlp.o) + reads]
    return [*(size - (branches + 1) * own for size in last), *(size - own for size in down)]


def in_backward(mlp: Mlp, alone: int) -> int:
    """Return the temporaries at the peak of the MLP's backward pass, in addition to saved tensors. `alone`: the block's
    int8 inputs that nothing else saves, which the graph of a recomputed block keeps until the recomputation ends."""
    share, o, s, a = mlp.share, mlp.o, mlp.s, mlp.a
    spec, run = share.spec, share.run
    f, h, one = share.tokens * spec.intermediate, spec.hidden * spec.intermediate, mlp.one
    # If the block is recomputed, the graph with the contexts of int8 layers has been freed.
    freed = mlp.s if run.checkpointing and mlp.stays and mlp.down and not mlp.drops else mlp.own
    moments = [f * (3 * o - freed)]  # of the branches' product
    if mlp.down:
        moments.append(f * ((2 * a - s if mlp.drops else a) if share.autocast else s))
    # The gradient of the last branch's output, its cast for the adapter, and the scaled cast. What the product of the
    # branches saved has been freed.
    wide = s != o
    if one and "gate_up_proj" in mlp.names:
        moments.append(f * ((4 if wide else 2) * s - o - freed))
    elif "up_proj" in mlp.names:
        moments.append(f * ((2 if wide else 1) * s - freed))
    if by_bitsandbytes(run):
        # A dequantized weight for the gradient of its input: NF4's in 16 bits like the gradient, int8's in its input's
        # dtype.
        element = o if mlp.stays else 2
        moments.append((2 if one else 1) * element * h - f * (freed + (o if one else 0)))
        if run.checkpointing is None:
            moments.append(element * (h + f))
    if run.checkpointing and run.lora:
        # If down_proj's backward pass needs no recomputed tensor, its gradient exists before the recomputation.
        first = f * o if by_bitsandbytes(run) and not mlp.down else 0
        # Selective checkpointing keeps the output of the adapter's matmul until the recomputation asks for it.
        waits = by_bitsandbytes(run) and run.checkpointing == "selective" and "up_proj" in mlp.names
        shared = mlp.down and not (mlp.drops or copies_input(share, BEHIND))
        first += 0 if shared else f * mlp.stays
        if mlp.down:  # the scaled gradient, the layer's output, and the output that waits
            first += share.tokens * spec.hidden * (s + o + s * (run.checkpointing == "selective"))
        moments.append(first + alone + in_forward(mlp, None, True, s if waits else 0))
    return max(moments) // run.tp
