"""Bytes of attention's scores where they are written out: in a block, S = micro_batch × heads × seq_len² / cp."""

from __future__ import annotations

from .share import Share, unmasked_layers

LONGEST_ROW = 1024  # that Inductor reduces without a loop


def score_elements(share: Share) -> int:
    """Return S, the elements of one block's attention matrix, before tensor parallelism divides its heads."""
    run = share.run
    return run.sequences * share.spec.heads * run.seq_len * (run.seq_len // run.cp)


def kept_scores(share: Share) -> int:
    """Return the bytes of scores kept for backward: softmax's output, and what multiplies V. Compiled, they are what
    softmax reads, as wide as the mask, and what multiplies V; dropout's mask, and what a cap's tanh returned."""
    spec, c = share.spec, share.attention_bytes
    if _compiled(share):
        element = share.bytes.residual + c + (spec.attention_dropout > 0) + c * bool(spec.attention_softcap)
        return score_elements(share) * element
    layers = unmasked_layers(spec, share.run) if share.kernel == "math" else spec.layers
    return score_elements(share) * softmax_element(share) * layers // spec.layers


def softmax_element(share: Share) -> int:
    """Return the bytes of each score that softmax and its neighbours return: its output, what multiplies V, dropout's
    mask, and what a cap's tanh returned."""
    c, element = share.attention_bytes, share.softmax_bytes
    if share.spec.attention_dropout:
        element += c + (c if share.cpu else 1)  # its output and its mask, on the CPU as wide as what it masks
    elif element != c:
        element += c
    if share.spec.attention_softcap:
        element += c  # tanh keeps its output
    return element


def forward_scores(share: Share) -> int:
    """Return the bytes alive at softmax beside what is kept: its input, as wide as it reads it, and under
    checkpointing, which keeps nothing, its output and that output's half copy too.

    "math" also marks which elements are -inf, and has the causal mask, fp32 copies of halves, and keys before their
    scale."""
    if not share.writes_scores:
        return 0
    spec, run, c, p = share.spec, share.run, share.attention_bytes, share.softmax_bytes
    if _compiled(share):  # under autocast the product's half result
        element = c * share.autocast + (share.bytes.residual + c) * (run.checkpointing is not None)
        return score_elements(share) * element // run.tp
    not_kept = p + (c if p != c else 0) if run.checkpointing else 0
    read = p if _widened(share) and not share.autocast else c
    total = score_elements(share) * (read + not_kept)
    if share.kernel == "math":
        Q, K = spec.query_width, spec.key_width
        width = Q + (Q + 2 * K if share.bytes.compute < 4 else 0) + (2 * Q if run.checkpointing else 0)
        total += score_elements(share) + c * run.seq_len**2 // run.cp * run.tp + c * share.tokens * width
    return total // run.tp


def backward_scores(share: Share) -> int:
    """Return the bytes alive in softmax's backward beside what forward kept.

    They are its gradient, grad × output (aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out makes it
    whole), and the result; the copy that multiplied V is free by then. Compiled, one kernel writes over what it reads.
    """
    c, p = share.attention_bytes, share.softmax_bytes
    if _compiled(share):
        element = _recomputed_element(share) if share.run.checkpointing else c
        return score_elements(share) * element // share.run.tp
    freed = c if p != c or share.spec.attention_dropout else 0
    result = p if _widened(share) else c
    return score_elements(share) * (2 * p + result - freed) // share.run.tp


def _recomputed_element(share: Share) -> int:
    """Return the bytes of each score in the backward of a compiled block that is recomputed, beside `kept_scores`.

    Rows of more than 1,024 scores are read in a loop, and then softmax's output is written, in fp32, for the next one
    (torch/_inductor/choices.py, should_use_persistent_reduction); it is made again from shorter ones, which stay. Where
    what products returned is kept, nothing asks for softmax before its gradient is there: one kernel makes both, and
    writes over none of the scores, which a cap's are then made of. Dropout made again has its random numbers in fp32,
    and its kernel is one with the next block's, of which scores, random numbers and what multiplies V are there too:
    both read GPT-2's mask (torch/_inductor/choices.py, can_fuse_horizontal). As simulations show, on an A100.
    """
    run, spec, c = share.run, share.spec, share.attention_bytes
    if spec.attention_dropout:
        return 2 * (2 * c + 4) - (2 * c + 1)
    if share.autocast:
        return c
    written, capped = 4 * (run.seq_len > LONGEST_ROW), c * bool(spec.attention_softcap)
    return written + c - capped if run.checkpointing == "selective" else (written or c) + 2 * capped


def causal_mask(share: Share) -> int:
    """Return the bytes of the additive mask that transformers makes for eager attention, or in a compiled step for
    SDPA; one for all layers and heads. Compiled eager attention computes it as it adds it."""
    made = (share.kernel == "eager" and not _compiled(share)) or (share.masked and not share.remade_masks)
    return score_elements(share) // share.spec.heads * share.bytes.compute if made else 0


def _widened(share: Share) -> bool:
    """Whether softmax reads fp32 where scores are halves: on a GPU it reads fp16 as it is and returns fp32, other
    halves are cast before (aten/src/ATen/native/SoftMax.cpp, softmax), and under autocast an fp32 mask is added."""
    fused = share.run.precision in ("fp16", "mixed-fp16") and not share.cpu
    return share.kernel == "eager" and share.softmax_bytes > share.attention_bytes and not fused


def _compiled(share: Share) -> bool:
    return share.kernel == "eager" and share.blocks_compiled
