"""Where Liger's kernels run in Triton's interpreter, ours agree: cross entropy, also fused with the linear, RoPE.

And its models are Hugging Face's: a Llama that it patched has the same loss and the same gradients.
"""

import sys

import pytest
import torch

import llmlab.course.kernels as kernels

if sys.platform != "linux":
    pytest.skip("Liger needs Triton, which has wheels for Linux alone", allow_module_level=True)

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = torch.tensor([3, -100, 0, 36, 5], device=DEVICE)


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    return tuple([value.clone().requires_grad_() for value in values] for _ in range(2))


def assert_same(ours, theirs, our_leaves, their_leaves):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.autograd.backward(ours, torch.ones_like(ours))
    torch.autograd.backward(theirs, torch.ones_like(theirs))
    for a, b in zip(our_leaves, their_leaves, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_cross_entropy():
    (ours,), (theirs,) = leaves((5, 37))
    wanted = LigerCrossEntropyFunction.apply(theirs * 1, TARGETS, None)[0]  # it overwrites its logits
    assert_same(kernels.cross_entropy(ours, TARGETS, rung=4), wanted, [ours], [theirs])


def test_linear_cross_entropy():
    (hidden, weight), (their_hidden, their_weight) = leaves((5, 16), (37, 16))
    wanted = LigerFusedLinearCrossEntropyFunction.apply(their_hidden, their_weight, TARGETS)[0]
    ours = kernels.linear_cross_entropy(hidden, weight, TARGETS, rung=4, chunk=2)
    assert_same(ours, wanted, [hidden, weight], [their_hidden, their_weight])


def test_rope():
    (q, k), (their_q, their_k) = leaves((2, 4, 5, 8), (2, 2, 5, 8))
    angle = torch.arange(20.0, device=DEVICE).view(1, 5, 4).repeat(1, 1, 2)  # both halves alike, as Llama's are
    wanted = torch.cat(LigerRopeFunction.apply(their_q * 1, their_k * 1, angle.cos(), angle.sin()), 1)
    ours = torch.cat(kernels.rope(q, k, angle.cos(), angle.sin(), rung=4), 1)
    assert_same(ours, wanted, [q, k], [their_q, their_k])


# ---------------------------------------------------------------- Hugging Face models

# The interpreter hands a kernel's float arguments over as Python floats, which have no .to(): these two cannot run.
RUNS_HERE = {} if DEVICE == "cuda" else {"rms_norm": False, "swiglu": False}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=131, max_position_embeddings=32)


@pytest.fixture
def unpatched(monkeypatch):
    """Liger replaces names in transformers' module, for every Llama of the process: afterwards they are put back."""
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)


def step(model, ids):
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out, torch.cat([weight.grad.flatten() for weight in model.parameters()])


def plain_step():
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(DEVICE).train()
    ids = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return model, ids, *step(model, ids)


def patch_class(state):
    model = AutoLigerKernelForCausalLM.from_config(CONFIG, **RUNS_HERE).to(DEVICE)
    model.load_state_dict(state)
    return model


def patch_instance(state):
    model = LlamaForCausalLM(CONFIG).to(DEVICE)
    model.load_state_dict(state)
    apply_liger_kernel_to_llama(model=model, **RUNS_HERE)
    return model


@pytest.mark.parametrize("patch", [patch_class, patch_instance])
def test_a_patched_llama_has_the_same_loss_and_gradients_and_no_logits(unpatched, patch):
    model, ids, plain, gradients = plain_step()
    patched = patch(model.state_dict()).train()
    theirs, their_gradients = step(patched, ids)
    torch.testing.assert_close(theirs.loss, plain.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(their_gradients, gradients, rtol=1e-3, atol=1e-6)
    assert plain.logits is not None and theirs.logits is None


def test_evaluation_makes_the_logits_as_ever(unpatched):
    """The loss is fused in training mode alone, so what Liger saves is not saved when a model is evaluated."""
    model, ids, plain, _ = plain_step()
    with torch.no_grad():
        theirs = patch_class(model.state_dict()).eval()(input_ids=ids, labels=ids)
    assert theirs.logits.shape == plain.logits.shape
    torch.testing.assert_close(theirs.loss, plain.loss, rtol=1e-5, atol=0)


def test_liger_has_no_tokenizer():
    import liger_kernel.transformers

    assert not hasattr(liger_kernel.transformers, "AutoTokenizer")


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled, they run")
@pytest.mark.parametrize("kernel", RUNS_HERE)
def test_the_interpreter_cannot_run_kernels_with_float_arguments(unpatched, kernel):
    """The chapter says so; the day that this fails, its flags can go."""
    from triton.runtime.errors import InterpreterError

    model = AutoLigerKernelForCausalLM.from_config(CONFIG, **{**RUNS_HERE, kernel: True}).train()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InterpreterError, match="'float' object has no attribute 'to'"):
        model(input_ids=ids, labels=ids).loss.backward()
