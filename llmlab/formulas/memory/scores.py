"""Bytes of attention scores that are stored in memory: in a block, S = micro_batch × heads × seq_len² / cp."""

from __future__ import annotations

from .share import Share, unmasked_layers

LONGEST_ROW = 1024  # scores, which Inductor reduces without a loop


def score_elements(share: Share) -> int:
    """Return S, the elements of one block's attention matrix, before tensor parallelism divides its heads."""
    run = share.run
    return run.sequences * share.spec.heads * run.seq_len * (run.seq_len // run.cp)


def kept_scores(share: Share) -> int:
    """Return the bytes of saved scores: the output of softmax and the factor of V. Compiled code saves the input of
    softmax, as wide as the mask, instead of its output. The dropout mask and the output of a softcap's tanh are saved
    too. A compiled block that is recomputed writes the output of softmax in fp32 and in 16 bits or, if
    the outputs of matmuls are saved, the scores."""
    spec, run, c = share.spec, share.run, share.attention_bytes
    if _compiled(share):
        element = share.bytes.residual + c + (spec.attention_dropout > 0) + c * bool(spec.attention_softcap)
        if run.checkpointing:
            element = c + (4 * (c < 4) if run.checkpointing == "full" else c)
        return score_elements(share) * element
    layers = unmasked_layers(spec, run) if share.kernel == "math" else spec.layers
    return score_elements(share) * softmax_element(share) * layers // spec.layers


def computed_again(share: Share) -> int:
    """Return how many bytes of `kept_scores` a compiled first block does not save: with a softcap, it computes the
    input of softmax again from the output of the matmul. In later blocks the partitioner does not repeat the sum with
    the mask, which was first used far before them (torch/_functorch/partitioners.py, ban_if_used_far_apart)."""
    if not (_compiled(share) and share.first and share.spec.attention_softcap) or share.run.checkpointing:
        return 0
    return score_elements(share) * share.bytes.residual


def softmax_element(share: Share) -> int:
    """Return the bytes per score of the outputs of softmax and its neighbors: softmax's output, the factor of V, the
    dropout mask, and the output of a softcap's tanh."""
    c, element = share.attention_bytes, share.softmax_bytes
    if share.spec.attention_dropout:
        element += c + (c if share.cpu else 1)  # its output and its mask, which on a CPU has the output's dtype
    elif element != c:
        element += c
    if share.spec.attention_softcap:
        element += c  # tanh saves its output
    return element


def forward_scores(share: Share) -> int:
    """Return the temporaries during softmax: its input, in the dtype that it reads, and under checkpointing, which
    saves no scores, also its output and the output's 16-bit copy.

    "math" also allocates a mask of the elements that are -inf, the causal mask, fp32 copies of 16-bit inputs, and
    unscaled keys.
    """
    if not share.writes_scores:
        return 0
    spec, run, c, p = share.spec, share.run, share.attention_bytes, share.softmax_bytes
    if _compiled(share):  # the output of the matmul, if it is not saved, and from it the factor of V, if it is narrower
        element = (c + c * (c < 4)) if run.checkpointing else c * (share.autocast and not spec.attention_softcap)
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
    """Return the temporaries of softmax's backward pass, in addition to saved scores.

    They are the gradient of its output, grad × output (a whole tensor: aten/src/ATen/native/cuda/SoftMax.cu,
    softmax_backward_cuda_out), and the result. The copy that multiplied V has been freed. In compiled code, one kernel
    overwrites its input.
    """
    c, p = share.attention_bytes, share.softmax_bytes
    if _compiled(share):
        element = _recomputed_element(share) if share.run.checkpointing else c
        return score_elements(share) * element // share.run.tp
    freed = c if p != c or share.spec.attention_dropout else 0
    result = p if _widened(share) else c
    return score_elements(share) * (2 * p + result - freed) // share.run.tp


def _recomputed_element(share: Share) -> int:
    """Return the temporaries per score in the backward pass of a compiled, recomputed block, beyond `kept_scores`: the
    gradient, and beside the scores of a selective block the output of softmax in fp32, if a row is too long to be
    computed again in the kernel that reads it (torch/_inductor/choices.py, should_use_persistent_reduction).

    Inductor fuses kernels of neighboring blocks that read the same mask (torch/_inductor/choices.py,
    can_fuse_horizontal), so that the scores of two blocks exist: of dropout, with random numbers in fp32, and of a
    softcap that is recomputed without autocast. All of this is from simulations of an A100.
    """
    run, spec, c = share.run, share.spec, share.attention_bytes
    if spec.attention_dropout:
        return 2 * (2 * c + 4) - kept_scores(share) // score_elements(share)
    if run.checkpointing == "selective":
        return c + 4 * (run.seq_len > LONGEST_ROW)
    return 4 * c if spec.attention_softcap and not share.autocast else c


def causal_mask(share: Share) -> int:
    """Return the bytes of the additive mask that transformers creates for eager attention, or in a compiled step for
    SDPA: one for all layers and heads. Compiled eager attention computes the mask in the kernel that adds it."""
    made = (share.kernel == "eager" and not _compiled(share)) or (share.masked and not share.remade_masks)
    return score_elements(share) // share.spec.heads * share.bytes.compute if made else 0


def _widened(share: Share) -> bool:
    """Whether softmax reads fp32 although scores are in 16 bits. On a GPU, it reads fp16 without a cast and returns
    fp32; bf16 is cast first (aten/src/ATen/native/SoftMax.cpp, softmax), and under autocast an fp32 mask is added."""
    fused = share.run.precision in ("fp16", "mixed-fp16") and not share.cpu
    return share.kernel == "eager" and share.softmax_bytes > share.attention_bytes and not fused


def _compiled(share: Share) -> bool:
    return share.kernel == "eager" and share.blocks_compiled
