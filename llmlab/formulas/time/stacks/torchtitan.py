"""torchtitan's eager operators."""

from __future__ import annotations

from ....specs.run import stack_of
from ...again import share_again
from ...memory.share import Share
from ..traffic import Pass, rmsnorm


def block(share: Share) -> float:
    """Return the bytes that torchtitan's eager operators move for a micro-batch in a block, forward and backward; `r`,
    `c` as in `fused_block` (torchtitan/models/llama3/model/model.py, torch 2.8 and later).

        norm            one operator: reads, writes; backward reads its input and a gradient, writes one. Or, with
                        norm_type="rmsnorm", several operators
        sums            of a branch and the stream; backward of the gradients from all readers of one tensor
        rotation        queries and keys to fp32 and back, with a complex multiplication in between; backward too
        activation      SiLU and a multiplication: 2 f and 3 f; backward 3 f and two multiplications of 3 f
    """
    spec, run, T, r, c = share.spec, share.run, share.tokens, share.bytes.residual, share.bytes.compute
    heads, width = (spec.query_width + spec.key_width) / run.tp, share.mlp_width * c / run.tp
    stream = spec.hidden / (run.tp if run.sequence_parallel else 1)
    rotated = heads * (2 * c + 16)
    normed = heads if spec.qk_norm else 0.0
    norm, of_heads = Pass(r + c, 2 * r + c), Pass(2 * c, 3 * c)
    if stack_of(run).norm_type == "rmsnorm":
        norm, of_heads = rmsnorm(r, True), rmsnorm(c, True)
    forward = 2 * stream * norm.forward + 2 * 3 * stream * r + rotated + 5 * width + normed * of_heads.forward
    summed = 2 * 3 * stream * r + 3 * 3 * spec.hidden * c
    backward = 2 * stream * norm.backward + summed + rotated + 9 * width + normed * of_heads.backward
    return T * (forward * (1 + share_again(spec, run)) + backward)
