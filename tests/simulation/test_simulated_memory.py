"""What optimizers, checkpointing and caches take on a simulated GPU, to the byte, derived from shapes.

    N  width    M  rows
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import llmlab as lab
from llmlab.formulas.inference import kv_cache_bytes
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

CARD = "A100-40GB"
M, N = 64, 256
FULL = 4 * M * N  # bytes of (M, N) in fp32


def block(size: int) -> int:
    """Bytes of the block that a request of `size` takes: multiples of 512."""
    return ceil(size / 512) * 512


def on_card(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=grad)


def held_and_peak(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that `run` leaves allocated, the most it had above where it began, and what it returned."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before, result


# ---- attention


@pytest.mark.parametrize(("gpu", "workspace"), [
    ("T4", 2 * 4096 * 1024 + 8 * 16 * 1024), ("A100-40GB", 2 * 4096 * 1024 + 8 * 16 * 1024),
    ("H100-80GB", 8 * 4096 * 1024),
])  # fmt: skip
def test_each_threads_cublas_handle_takes_a_workspace_and_keeps_it(gpu, workspace):
    """aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: :4096:2:16:8 KiB, on sm_90 4096 × 8 KiB."""
    with simulator(gpu):
        x, weight = on_card(M, N), on_card(N, N)
        held, _, y = held_and_peak(lambda: x @ weight)
        assert held == FULL + workspace
        held, _, gradients = held_and_peak(lambda: torch.autograd.grad(y, (x, weight), torch.ones_like(y)))
        assert held == workspace + 4 * (M * N + N * N)  # backward's thread has a handle of its own
        assert held_and_peak(lambda: (x @ weight).sum().backward())[0] == 4 * (M * N + N * N)
        del gradients


def test_the_cublas_workspace_is_what_the_environment_asks_for(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8")
    with simulator("A100-40GB"):
        x, weight = on_card(M, N), on_card(N, N)
        assert held_and_peak(lambda: x @ weight)[0] == FULL + (4096 * 8 + 16 * 8) * 1024


# ---- optimizers, clipping, scaling


SIZES = (256, 65536, 131072)
STATE = 4 * sum(SIZES)


def stepped(optimizer: type, **options: Any) -> tuple[int, int]:
    """Bytes that the second step adds for good and at its peak."""
    parameters = [nn.Parameter(on_card(size)) for size in SIZES]
    taken = optimizer(parameters, **options)
    for each in parameters:
        each.grad = torch.empty_like(each)
    held, _, _ = held_and_peak(taken.step)
    return held, held_and_peak(taken.step)[1]


@pytest.mark.parametrize(("options", "steps", "temporaries"), [
    ({}, 0, STATE),  # _multi_tensor_adamw: _foreach_sqrt of all second moments at once
    # _single_tensor_adam: sqrt and its quotient, while the variable still holds the quotient of the parameter before
    ({"foreach": False}, 0, 4 * (2 * SIZES[2] + SIZES[1])),
    ({"fused": True}, 512 * len(SIZES), 0),  # one kernel; its step counts are on the GPU
], ids=["foreach", "for-loop", "fused"])  # fmt: skip
def test_adamw_takes_two_moments_and_the_temporaries_of_its_implementation(card, options, steps, temporaries):
    """torch/optim/adam.py; foreach is what CUDA tensors get by default (torch/optim/optimizer.py)."""
    assert stepped(torch.optim.AdamW, **options) == (2 * STATE + steps, temporaries)


def test_clipping_takes_a_norm_a_gradient_and_partial_norms_of_64_ki_elements(card):
    """torch/nn/utils/clip_grad.py; cuda/ForeachReduceOp.cu: as many partial norms a tensor as the largest has chunks.

    norms, their stack, its norm; at most there are partials and norms, in fp32."""
    many = 200
    parameters = [nn.Parameter(on_card(256)) for _ in range(many - 1)] + [nn.Parameter(on_card(65536 * 3))]
    for each in parameters:
        each.grad = torch.empty_like(each)
    held, peak, norm = held_and_peak(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
    assert held == 512 and norm.shape == ()
    assert peak == block(4 * many * 3) + many * 512
    # without foreach the norms are the same and no partials are made, but the stack of norms is
    assert held_and_peak(lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False))[1] < peak


def test_a_grad_scaler_keeps_two_numbers_and_from_unscaling_to_update_a_third(card):
    """torch/amp/grad_scaler.py: _scale and _growth_tracker; found_inf of the optimizer's device until update()."""
    parameter = nn.Parameter(on_card(N))
    parameter.grad = torch.empty_like(parameter)
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cuda")
    loss = parameter.sum()
    held, _, scaled = held_and_peak(lambda: scaler.scale(loss))
    assert held == 3 * 512  # and the scaled loss
    assert held_and_peak(lambda: scaler.unscale_(optimizer))[0] == 512
    assert held_and_peak(lambda: scaler.step(optimizer))[0] == 0
    assert held_and_peak(scaler.update)[0] == -512
    del scaled


# ---- checkpointing


LAYERS = 4


def mlp(width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False))


def checkpointed(**options: Any) -> tuple[int, int]:
    """Bytes kept for backward by 4 blocks of x + mlp(x), and backward's peak above that."""
    blocks = [mlp().cuda() for _ in range(LAYERS)]
    x = on_card(1024, 128)
    sum(block(x[:1]).sum() for block in blocks).backward()  # gradients and workspaces are there
    x.grad = None

    def forward() -> Tensor:
        h = x
        for each in blocks:
            h = checkpoint(each, h, **options) if options else each(h)
        return h

    held, _, out = held_and_peak(forward)
    return held, held_and_peak(lambda: out.backward(torch.empty_like(out)))[1]


def test_both_kinds_of_checkpointing_keep_the_inputs_of_blocks(card):
    """torch/utils/checkpoint.py: CheckpointFunction saves its inputs, the hooks of the other keep a frame's inputs.

    The last block's output is the result, the first one's input was there. The reentrant one recomputes a block to its
    end; the other stops as soon as it has what backward asks for (early stop), which spares the last output."""
    row = 4 * 1024 * 128
    kept, peak = checkpointed(use_reentrant=False)
    kept_reentrant, peak_reentrant = checkpointed(use_reentrant=True)
    everything, _ = checkpointed()
    assert kept == kept_reentrant == LAYERS * row
    assert everything == LAYERS * row + LAYERS * 2 * 4 * row  # GELU's input, which is 4 times as wide, and its output
    assert peak_reentrant - peak == row


def test_selective_checkpointing_keeps_what_its_policy_saves(card):
    """torch/utils/checkpoint.py, create_selective_checkpoint_contexts: the products' outputs beside the inputs."""
    row = 4 * 1024 * 128

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = operator == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    kept, _ = checkpointed(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    assert kept == LAYERS * (row + 4 * row)  # each block's output is the product that is saved, or the next one's input


# ---- caches, experts, int8


LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 1000,
         "max_position_embeddings": 256}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_a_static_cache_is_made_at_once_and_a_dynamic_one_grows_to_the_same_formula(card, static):
    """transformers/cache_utils.py: StaticLayer.lazy_initialization makes max_cache_len positions, DynamicLayer.update
    concatenates: after generate() both hold what the estimate's formula says of the positions they have."""
    from transformers import AutoConfig, AutoModelForCausalLM

    batch, prompt, new = 2, 64, 3
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).cuda().eval()
    ids = torch.ones(batch, prompt, dtype=torch.int64, device="cuda")
    options = {"cache_implementation": "static"} if static else {}
    made = model.generate(ids, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, eos_token_id=None,
                          pad_token_id=0, **options).past_key_values  # fmt: skip
    held = sum(each.numel() * each.element_size() for layer in made.layers for each in (layer.keys, layer.values))
    # the last token is sampled and never goes through the model
    run = lab.Inference(batch, prompt, new - 1, weights="fp32", kv="fp32")
    assert held == kv_cache_bytes(lab.model(LLAMA), run)


@pytest.mark.parametrize("gpu", ["T4", "A100-80GB"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-fp16", "bf16"])
def test_experts_train_in_every_dtype(gpu, precision):
    """native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: what its kernel does not take goes product by product."""
    run = lab.Training(micro_batch=2, seq_len=64, precision=precision)
    if gpu == "T4" and precision == "bf16":
        with pytest.raises(lab.SpecError, match="no bf16"):
            lab.simulate(MIXTRAL, run, gpu)
        return
    report = lab.simulate(MIXTRAL, run, gpu)
    width = 2 if precision == "bf16" else 4
    weights = width * lab.model(MIXTRAL).parameters
    assert report.outcome == "fits"
    assert report.parts["weights"] == pytest.approx(weights, rel=0.01)
    assert report.phases["backward"] > 2 * weights


def test_int8_says_that_it_assumes_no_outliers():
    pytest.importorskip("bitsandbytes")
    run = lab.Inference(batch=1, prompt_len=16, new_tokens=2, weights="int8")
    assert any(note.code == "int8-outliers" for note in lab.simulate(LLAMA, run, CARD).notes)
    assert not lab.simulate(LLAMA, lab.Inference(1, 16, 2, "fp16", "fp16"), CARD).notes
