"""The bytes that operators between matrix products move."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import llmlab as lab
from llmlab import LoRA, Training
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.temporaries import loss_chunk
from llmlab.formulas.time.elementwise import ENGINE_CASTS, engine_casts, fused_block, moved
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import passes

LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
         "max_position_embeddings": 2048}  # fmt: skip


def test_torchtitans_swiglu_moves_5_tensors_of_its_width_forward_and_9_backward():
    """SiLU reads and writes, its product with the other branch reads two and writes one; backward three and two of
    three, in half."""
    run = lab.Training(seq_len=1024, dp=8, stack=lab.Torchtitan(ac="none"))
    wide, narrow = (moved(lab.model({**LLAMA, "intermediate_size": width}), run).blocks for width in (2048, 1024))
    assert wide - narrow == pytest.approx(4 * 1024 * 1024 * (5 + 9) * 2)


def test_backward_sends_tokens_to_their_experts_in_more_bytes_than_forward():
    """Forward gathers halves and sums what experts return; backward scatters gradients and adds them up in fp32
    (integrations/moe.py of transformers). Of experts of 8 channels hardly anything else moves."""
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 8}
    run = lab.Training(seq_len=1024, precision="bf16")

    def another_expert(run):
        one, two = (moved(lab.model({**mixtral, "num_experts_per_tok": each}), run).blocks for each in (1, 2))
        return two - one

    forward = another_expert(replace(run, checkpointing="full")) - another_expert(run)
    assert another_expert(run) - forward > 2 * forward > 0


@pytest.mark.parametrize("kernels", [None, "liger"])
def test_math_moves_16_bytes_per_score_forward_and_24_backward_in_blocks_of_liger_too(kernels):
    """16 bytes per score in the forward pass, which checkpointing repeats, and 24 in the backward pass; grouped heads
    in fp16 leave a T4 only "math"."""
    spec = lab.model({**LLAMA, "num_key_value_heads": 2})
    run = lab.Training(seq_len=2048, precision="autocast-fp16", checkpointing="full", kernels=kernels)
    math, efficient = (
        moved(spec, replace(run, attention=way), lab.gpu("T4")).blocks for way in ("sdpa", "efficient")
    )
    assert math - efficient == pytest.approx(4 * 8 * 2048**2 * (2 * 16 + 24), rel=0.1)


def test_transformer_engine_casts_one_more_input_two_gradients_and_three_weights_of_a_wider_mlp():
    """A gated MLP's first two matmuls share an input, which is as wide as the model."""
    run, casts = lab.Training(seq_len=1024, stack=lab.Megatron(fp8_recipe="tensorwise")), ENGINE_CASTS["tensorwise"]
    wide, narrow = (engine_casts(lab.model({**LLAMA, "intermediate_size": width}), run) for width in (2048, 1024))
    of_tokens = run.tokens * (casts.other + 2 * casts.gradient)
    assert wide - narrow == 4 * 1024 * (of_tokens + 3 * 512 * casts.weight)


def test_fused_kernels_move_each_tensor_once():
    """A Llama block in bf16, per token: norms 2 · 8 h, (3 · 2 + 3 · 2) h and (3 · 2 + 2 · 2) h, rotations 8 (q + k),
    MLP (3 + 6) · 2 f."""
    spec, run = lab.model("Llama-3.1-8B"), Training(seq_len=1, precision="bf16", compile=True)
    h, q, k, f = spec.hidden, spec.query_width, spec.key_width, spec.intermediate
    assert fused_block(share_of(spec, run)) == 2 * 8 * h + 22 * h + 8 * (q + k) + 18 * f
    assert moved(spec, run).loss == (8 + 4) * spec.vocab  # and zeros for the gradient of the logits that it returns
    assert moved(spec, replace(run, kernels="fused-loss")).loss == 6 * spec.vocab  # Liger reads twice, writes once


def swiglu(x):
    """megatron/core/transformer/mlp.py, not fused."""
    gate, other = torch.chunk(x, 2, dim=-1)
    return torch.nn.functional.silu(gate) * (other + 0.0)


def rotate(x, cosines, sines):
    """megatron/core/models/common/embeddings/rope_utils.py, not fused."""
    turned, kept = x[..., : cosines.shape[-1]], x[..., cosines.shape[-1] :]
    first, second = torch.chunk(turned, 2, dim=-1)
    turned = turned * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((turned, kept), dim=-1)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write; what fills with zeros reads nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = [] if func is torch.ops.aten.slice_backward.default else tree_leaves((args, kwargs))
            self.bytes += sum(each.nbytes for each in [*read, *tree_leaves(out)] if isinstance(each, torch.Tensor))
        return out


def moved_by(function, *shapes):
    """Return the bytes that `function` moves forward and backward, of the first of tensors in bf16 of `shapes`."""
    tensors = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    traffic = Traffic()
    with traffic:
        made = function(tensors[0].requires_grad_(), *tensors[1:])
    gradient = torch.ones_like(made)
    with traffic:
        made.backward(gradient)
    return traffic.bytes


def test_what_megatron_does_not_fuse_moves_what_its_operators_do():
    spec, run = lab.model("Llama-3.1-8B"), Training(micro_batch=8, seq_len=8, stack="megatron")

    def more(option, spec=spec):
        return moved(spec, replace(run, stack=f"megatron:{option}=false")).blocks - moved(spec, run).blocks

    tokens, Q, K, f = run.tokens, spec.query_width, spec.key_width, spec.intermediate
    assert more("bias_swiglu_fusion") == spec.layers * (moved_by(swiglu, (tokens, 2 * f)) - 16 * tokens * f)
    biased = lab.model({**spec.config, "mlp_bias": True})
    assert more("bias_swiglu_fusion", biased) - more("bias_swiglu_fusion") == spec.layers * 2 * (2 + 2) * tokens * f
    heads = (8, 8, (Q + K) // 128, 128), (8, 1, 1, 128), (8, 1, 1, 128)
    fused = 8 * tokens * (Q + K)
    assert more("apply_rope_fusion") == pytest.approx(spec.layers * (moved_by(rotate, *heads) - fused), rel=0.01)
    own = "megatron:transformer_engine=false"
    one, other = (replace(run, stack=stack, attention="eager") for stack in (own, f"{own},apply_rope_fusion=false"))
    assert moved(spec, one) == moved(spec, other)  # its own layers have no such kernel


def test_ligers_loss_multiplies_and_casts_the_heads_weight_once_a_chunk():
    """32 chunks of 128 of Llama 3's 4,096 tokens. A frozen head in fp32 is cast for each of their two products under
    autocast, a trained one for the first of them: the second's cast is cached."""
    spec = lab.model("Llama-3.1-8B")
    assert [loss_chunk(spec, tokens) for tokens in (1, 4096, 4097, 8192)] == [1, 128, 256, 256]
    head = spec.vocab * spec.hidden
    for lora, casts in ((None, 32 + 1), (LoRA(rank=8), 2 * 32)):
        given = {"kernels": "liger", "lora": lora}
        half, wide = (Training(4, 1024, precision=each, **given) for each in ("bf16", "autocast-bf16"))
        assert moved(spec, wide).loss - moved(spec, half).loss == casts * (4 + 2) * head
    plain, fused = (Training(4, 1024, precision="bf16", kernels=each) for each in (None, "liger"))
    found = kernels("H100")
    chunk = found.matmul(128, spec.vocab, spec.hidden, "bf16")
    once = found.matmul(4096, spec.vocab, spec.hidden, "bf16")
    more = passes(spec, fused, lab.gpu("H100")).products["head"] - passes(spec, plain, lab.gpu("H100")).products["head"]
    assert more > 32 * chunk - once > 0


def test_megatrons_kernels_move_what_they_read_and_write():
    """Counted by hand for a GPT's block, tensors of the stream's size, all of 2 bytes, and masks of half of that.

    forward   2 norms: read, write; 2 sums: a branch and the stream read, the stream and a mask written
    backward  2 norms: input and gradient read, one written; 2 sums of the stream's two gradients; dropout's: gradient
              and mask read, one written, and read for the bias
    divided   GELU: 4 read, 4 written, and 8 and 4; biases of 3 and 4; gradients of queries, keys, values put together
    """
    config = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 8, "vocab_size": 50304, "n_positions": 2048,
              "activation_function": "gelu"}  # fmt: skip
    spec = lab.model(config)
    assert spec.dropout == spec.attention_dropout == 0.1
    forward, backward = 2 * 2 + 2 * 3.5, 2 * 3 + 2 * 3 + 2 * 2.5 + 2
    kernels_, biases, joined = 8 + 12, 3 + 4, 2 * 3

    def streams(**settings):
        run = Training(**{"seq_len": 2048, "precision": "mixed-bf16", "stack": lab.Megatron(), **settings})
        return moved(spec, run).blocks / (2 * 2048 * 1024)

    assert streams() == pytest.approx(forward + backward + kernels_ + biases)
    assert streams(tp=4) == pytest.approx(forward + backward + (kernels_ + biases) / 4)
    divided = (forward + backward + kernels_ + biases) / 4
    assert streams(tp=4, sequence_parallel=True) == pytest.approx(divided)
    assert streams(checkpointing="full") == pytest.approx(streams() + forward + 8)
    own = lab.Megatron(transformer_engine=False)
    scores = 8 * 2048 / 1024  # by the stream's width: softmax and dropout, there and back, and what is put in order
    eager = (4 + 5 + 6 + 5) / 2 * scores + 2
    assert streams(stack=own) == pytest.approx(streams() + joined + eager)
