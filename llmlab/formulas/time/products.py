"""The matmuls of a training step: the sizes of the matrices, and how often each is computed, forward and backward.

Other modules use this list: `flops` counts its FLOP, and `step` looks up the time of each matmul. A linear layer from
k to n features with m rows of input computes three matmuls: (m, k) · (k, n) in the forward pass, and in the backward
pass (m, n) · (n, k) for the gradient of the input and (n, m) · (m, k) for that of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

from ...specs.model import ModelSpec
from ...specs.parameters import ROW_PARALLEL, Linear
from ...specs.run import Training, stack_of
from ..again import module_again, wholly_recomputed_blocks
from ..memory.methods import other_models, value_run
from ..memory.share import adapter_bytes, by_bitsandbytes

# torchtitan's "selective_op" does not save every second matmul of a block, in the order in which they run: wq, wk, wv,
# wo, w1, w3, w2 (torchtitan/distributed/activation_checkpoint.py).
SECOND = ("k_proj", "o_proj", "up_proj")


class Product(NamedTuple):
    """The matmuls of a linear layer per micro-batch, in the whole model: how often each of the three is computed.

    `copies`: rows of input per token, because a token goes to several experts. `again`: how many matmuls checkpointing
    recomputes. `cut`: the dimension that tensor parallelism divides.
    """

    part: str
    inputs: int
    outputs: int
    forward: int
    input_gradient: int
    weight_gradient: int
    again: int
    copies: int = 1
    cut: Literal["inputs", "outputs", ""] = ""

    def flops(self, tokens: int) -> tuple[int, int, int]:
        """Return the FLOP for `tokens` tokens: forward, backward, and recomputation."""
        once = 2 * tokens * self.copies * self.inputs * self.outputs
        return once * self.forward, once * (self.input_gradient + self.weight_gradient), once * self.again


@lru_cache(maxsize=256)
def products(spec: ModelSpec, run: Training) -> tuple[Product, ...]:
    """Return every matmul with weights: linear layers, adapters, router and experts."""
    first = gradients_of_first_block(spec, run)
    linears = spec.block_linears if run.num_labels else spec.linears  # a classifier's head reads one token
    matmuls = [matmul for linear in linears for matmul in _linear(spec, run, linear, first)]
    matmuls += _experts(spec, run)
    if modules := stack_of(run).mtp_layers:
        matmuls.append(Product("mtp", 2 * spec.hidden, spec.hidden, modules, modules, modules, 0))
    if run.method == "sft":
        return tuple(matmuls)
    if run.objective.loss == "chunked":  # the backward pass computes the logits again
        matmuls = [matmul._replace(again=matmul.forward) if matmul.part == "head" else matmul for matmul in matmuls]
    for other in other_models(spec, run):
        plain = replace(run.update, lora=None, checkpointing=None)
        matmuls += [matmul._replace(forward=other.passes * matmul.forward, input_gradient=0, weight_gradient=0)
                    for matmul in products(other.spec, plain) if other.scores or matmul.part != "head"]  # fmt: skip
    if run.objective.critic:
        matmuls += [matmul for matmul in products(spec, value_run(run)) if matmul.part != "head"]
    return tuple(matmuls)


def _linear(spec: ModelSpec, run: Training, linear: Linear, first: dict[str, bool]) -> Iterator[Product]:
    """Yield a linear layer's matmuls and those of its adapter. The backward pass computes the gradient of its input if
    something before the layer is trained, and the gradient of its weight if the weight is trained."""
    count, lora = linear.count * (1 + stack_of(run).mtp_layers * (linear.part == "head")), run.lora
    reached = count - (not first.get(f"{linear.part} {linear.name}", True))
    again = _recomputed(spec, run, linear) if run.checkpointing else 0
    cut: Literal["inputs", "outputs"] = "inputs" if linear.name in ROW_PARALLEL else "outputs"
    yield Product(linear.part, linear.inputs, linear.outputs, count, reached, 0 if lora else count, again, cut=cut)
    if lora is not None and linear.name in lora.targets:
        # Recomputation needs only the input of the block's last matmul. With an adapter, the last matmul is the upper
        # half of the adapter.
        down = count if run.checkpointing == "full" else 0
        up = 0 if is_last(spec, linear) else down
        yield Product("adapters", linear.inputs, lora.rank, count, reached, count, down)
        yield Product("adapters", lora.rank, linear.outputs, count, count, count, up)


def _experts(spec: ModelSpec, run: Training) -> Iterator[Product]:
    """Yield the matmuls of the router, which sees every token, and of the experts, experts_per_token of them per
    token."""
    if not spec.experts:
        return
    layers, trained = spec.moe_layers, 0 if run.lora else spec.moe_layers
    again = layers * wholly_recomputed_blocks(spec, run) // spec.layers
    hidden, width, copies = spec.hidden, spec.moe_intermediate, spec.experts_per_token
    yield Product("router", hidden, spec.experts, layers, layers, trained, again)
    yield Product("experts", hidden, width, 2 * layers, 2 * layers, 2 * trained, 2 * again, copies, "outputs")
    yield Product("experts", width, hidden, layers, layers, trained, again, copies, "inputs")


def gradients_of_first_block(spec: ModelSpec, run: Training) -> dict[str, bool]:
    """Return, for each layer of the first block, whether its input has a gradient: frozen embeddings have none, and no
    layer before the first adapter needs one. The result is empty if all inputs have one. "scores q", "scores k" and
    "scores v" say whether queries, keys and values have a gradient."""
    if run.lora is None or run.checkpointing is not None:
        return {}
    targets, has_gradient = run.lora.targets, {}
    through = {"attention": False, "mlp": False}  # whether the part's tensors so far need a gradient
    residual = False
    order = [linear for linear in spec.linears if linear.part in through]
    later = {"q_b_proj": "q_a_proj", "kv_b_proj": "kv_a_proj_with_mqa"}
    has: dict[str, bool] = {}
    for linear in order:
        before = residual
        if linear.name in ROW_PARALLEL:
            before = residual or through[linear.part]
        elif linear.name in later:
            before = has[later[linear.name]]
        has_gradient[f"{linear.part} {linear.name}"] = before
        has[linear.name] = before or linear.name in targets
        through[linear.part] |= has[linear.name]
        if linear.name in ROW_PARALLEL:
            residual |= has[linear.name]
    q = has.get("q_proj", has.get("q_b_proj", has.get("c_attn" if spec.family == "gpt2" else "qkv_proj", False)))
    has_gradient["scores q"] = q
    has_gradient["scores k"] = has.get("k_proj", has.get("kv_b_proj", q))
    has_gradient["scores v"] = has.get("v_proj", has.get("kv_b_proj", q))
    return has_gradient


def multiplied_wide(run: Training) -> bool:
    """Whether adapters are multiplied in fp32, the dtype in which peft stores them. Autocast, and engines with an fp32
    copy of all weights, multiply them in 16 bits."""
    return run.precision in ("fp32", "fp16", "bf16") and adapter_bytes(run) == 4


def is_last(spec: ModelSpec, linear: Linear) -> bool:
    """Whether the layer's output is the output of its block. Nothing saves this output, so recomputation stops before
    the layer (early stop)."""
    ends = spec.norms_per_layer == 2 and not spec.dropout
    mlp_end = linear.name == "down_proj" or (linear.name == "c_proj" and linear.part == "mlp")
    return ends and mlp_end and not (spec.experts and spec.dense_layers == 0)


def _recomputed(spec: ModelSpec, run: Training, linear: Linear) -> int:
    """Return how many of a linear layer's matmuls checkpointing computes again."""
    if linear.part == "head":
        return 0
    stack = stack_of(run)
    if stack.recomputes_one_in or stack.recompute_modules:  # these recompute blocks or modules to their end
        if linear.part == "mlp" and module_again(run, "mlp"):
            return linear.count
        if linear.name in ("q_b_proj", "kv_b_proj") and module_again(run, "mla_up_proj"):
            return linear.count
        return linear.count * wholly_recomputed_blocks(spec, run) // spec.layers
    if run.checkpointing == "selective" and stack.recomputes_every_second_matmul:
        return linear.count if linear.name in SECOND else 0
    if run.checkpointing == "selective" and not by_bitsandbytes(run):
        return 0
    adapted = run.lora is not None and linear.name in run.lora.targets
    return 0 if is_last(spec, linear) and not adapted else linear.count
