"""What Python of Megatron-LM takes of the CPU in a layer, and outside of layers, beside transformers' Llama.

    PYTHONPATH=.:_build/stacks python -m benchmarks.time.megatron_host  # prints; a minute

megatron-core's GPT of its own layers, in its DistributedDataParallel, on one process and tiny tensors: forks of the
random state, which need a card, and Apex's kernels are left out. Two depths, so that embedding and head are not
counted in a layer; the least CPU time of this thread in many rounds, in which all take turns, each thrice, of which the
first is not counted: on a busy machine seconds double, ratios stay. What follows is `MEGATRON` in
llmlab/formulas/time/host.py: transformers' operators, times the ratios.

Then whole steps in bf16, as train_step of Megatron-LM (megatron/training/training.py) and pretrain_gpt.py take them:
gradients set to zero, the schedule with one micro-batch and with two, and the update by each of Megatron's optimizers
of half weights. What no layer has is a micro-batch's or the step's, in operators of a Llama's block:
`MEGATRON_ENDS`, `STEPPED`, `CLEARED` and `MASTERED`. Timers have level 0, their default, which starts none in a step.

Last, a layer with experts, whose own class multiplies one after another: with two and with four local experts, from
which follows the time with all of them in one grouped matmul. The parts of its forward pass that CUDA graphs can
replace are timed alone (`MEGATRON_EXPERTS`, `GRAPHED`). All-to-alls are left out, because one process starts none.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor, distributed, nn

from benchmarks.provenance import provenance
from benchmarks.time.deepspeed_hooks import VIEW, Run, llama, timed
from llmlab.formulas.time.host import TRANSFORMERS
from llmlab.hardware.this_machine import host

SHALLOW, DEEP = 1, 8
LAYER, OTHERS = 12, 5  # parameters of a layer; and beside them: two embeddings, the last norm and the head
CORE = "megatron.core."
OPTIMIZER, SCHEDULES = CORE + "optimizer", CORE + "pipeline_parallel.schedules"
Step = Callable[[], tuple[float, ...]]  # seconds of setting gradients to zero, forward, backward, update


class Norm(nn.LayerNorm):
    """PyTorch's norm in the place of Apex's."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps)


def gpt(depth: int, experts: int | None = None, **settings: Any) -> tuple[Any, nn.Module]:
    """Return megatron-core's configuration of a GPT of `depth` tiny layers, and the GPT; with `experts`, norms of
    queries and keys, and no dropout, as in Qwen 3."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dropout = 0.0 if experts else 0.1
    if experts:
        settings |= {
            "num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "add_bias_linear": False,
            "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none", "qk_layernorm": True,
            "gated_linear_unit": True, "activation_func": nn.functional.silu, "bias_activation_fusion": True,
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=depth, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, use_cpu_initialization=True,
        hidden_dropout=dropout, attention_dropout=dropout, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, **settings,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(experts, qk_layernorm=bool(experts))
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if experts:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return config, GPTModel(config, layer, 128, 16, position_embedding_type="learned_absolute")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, their positions and the mask."""
    return torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None], torch.zeros(1, 1, 8, 8).bool()


def megatron(depth: int, experts: int | None = None) -> Run:
    """Return a run of megatron-core's GPT of `depth` tiny layers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config, whole = gpt(depth, experts)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), whole)
    ids, places, mask = inputs()

    def forward() -> Tensor:
        for parameter in model.parameters():
            parameter.grad_added_to_main_grad = False
        return model(ids, places, mask, labels=ids).mean()

    return lambda: timed(forward, Tensor.backward)


def loss(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of a micro-batch's losses, its tokens and both for the log, as pretrain_gpt.py's loss_func."""
    mask = mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    assert not torch.isnan(total) and not torch.isinf(total)
    tokens = mask.sum().clone().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.clone().detach().view(1), tokens.view(1)])}


def training(depth: int, shared: bool, batches: int = 1) -> Step:
    """Return a run of whole steps in bf16; `shared`: with the distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
    from megatron.core.timers import Timers
    from megatron.core.transformer.module import Float16Module

    half = {"bf16": True, "params_dtype": torch.bfloat16}
    config, whole = gpt(depth, **half, pipeline_dtype=torch.bfloat16)
    config.timers, config.finalize_model_grads_func = Timers(0, "minmax"), finalize_model_grads
    reduced = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=shared, check_for_nan_in_grad=True
    )
    model = DistributedDataParallel(config, reduced, Float16Module(config, whole))
    settings = OptimizerConfig(lr=1e-4, **half, use_distributed_optimizer=shared, clip_grad=1.0, timers=config.timers)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss
    ids, places, mask = inputs()
    batch, passes, clock = (ids, ids, torch.ones(1, 8), mask, places), [], time.thread_time
    backward = schedules.backward_step

    def forward_step(data: Iterator[Any], part: Any) -> tuple[Tensor, Callable]:
        ids, labels, weights, mask, places = (each.clone() for each in next(data))
        for each in (ids, labels, weights, mask, places):  # get_batch_on_this_tp_rank, also to one rank
            distributed.broadcast(each, 0)
        return part(ids, places, mask, labels=labels), partial(loss, weights)

    def backward_step(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        gradient = backward(*args, **kwargs)
        passes.append(clock() - start)
        return gradient

    def run() -> tuple[float, ...]:
        passes.clear()
        start = clock()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        cleared = clock()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter([batch] * batches), model=[model], seq_length=8,
            micro_batch_size=1, num_microbatches=batches,
        )  # fmt: skip
        passed = clock()
        done, norm, _ = optimizer.step()
        for said in (torch.tensor([done]), torch.tensor([norm])):
            distributed.all_reduce(said)
            said.item()
        total = torch.vstack([each["lm loss"] for each in losses]).sum(dim=0)
        distributed.all_reduce(total)
        total[0] / total[1], optimizer.get_loss_scale().item()
        back = sum(passes)
        return cleared - start, passed - cleared - back, back, clock() - passed

    def patched() -> tuple[float, ...]:
        with mock.patch(SCHEDULES + ".backward_step", backward_step):
            return run()

    assert sum(1 for _ in model.parameters()) == LAYER * depth + OTHERS
    return patched


def pieces(forward: Run, rounds: int) -> dict[str, float]:
    """Return the seconds of forward passes in which attention, the router and its preparation of the exchange run, and
    the seconds of all."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    seconds = dict.fromkeys(("all", "attn", "moe_router", "moe_preprocess"), 0.0)

    def timing(name: str, method: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = method(*args, **kwargs)
            seconds[name] += time.thread_time() - start
            return result

        return run

    with ExitStack() as patched:
        for kind, method, name in ((TransformerLayer, "_forward_attention", "attn"), (MoELayer, "route", "moe_router"),
                                   (MoELayer, "preprocess", "moe_preprocess")):  # fmt: skip
            patched.enter_context(mock.patch.object(kind, method, timing(name, getattr(kind, method))))
        for _ in range(rounds):
            seconds["all"] += forward()[0]
    return seconds


class Stream:
    """A CUDA stream or event, on which every call does nothing."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **settings: Stream()


def on_cpu(patched: ExitStack) -> None:
    """Let Megatron find a CPU where it names a card, and functions that start nothing in the place of kernels that take
    lists: Apex's, but torch's fused AdamW for its Adam."""
    for name in ("optimizer", "pipeline_parallel"):
        import_module(CORE + name)
    kind = Tensor.type

    def named(tensor: Tensor, *args: Any) -> Any:
        found = kind(tensor, *args)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    def made(function: Callable) -> Callable:
        return lambda *args, device=None, **settings: function(*args, **settings)

    def adam(params: Any, adam_w_mode: bool = True, **settings: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(params, fused=True, **settings)

    enter, nothing = patched.enter_context, SimpleNamespace(fork=nullcontext)
    enter(mock.patch(CORE + "tensor_parallel.get_cuda_rng_tracker", lambda: nothing))
    enter(mock.patch(CORE + "transformer.transformer_block.LayerNormImpl", Norm))
    enter(mock.patch.object(Tensor, "type", named))
    enter(mock.patch.object(Tensor, "cuda", lambda tensor: tensor))
    for name in ("Stream", "Event"):
        enter(mock.patch(f"torch.cuda.{name}", Stream))
    enter(mock.patch("torch.cuda.current_stream", Stream))
    enter(mock.patch("torch.cuda.stream", nullcontext))
    enter(mock.patch(CORE + "transformer.moe.moe_utils.te_general_gemm", None, create=True))
    for name in ("zeros", "tensor"):
        enter(mock.patch.object(torch, name, made(getattr(torch, name))))
    for module in ("clip_grads", "optimizer"):
        enter(mock.patch(f"{OPTIMIZER}.{module}.multi_tensor_applier", lambda kernel, buffer, lists, *more: kernel()))
        enter(mock.patch(f"{OPTIMIZER}.{module}.multi_tensor_scale_impl", lambda: None))
    enter(mock.patch(OPTIMIZER + ".clip_grads.l2_norm_impl", lambda: (torch.zeros(1), None)))
    enter(mock.patch.multiple(OPTIMIZER, USING_PYTORCH_OPTIMIZER=False, Adam=adam))


@click.command()
@click.option("--rounds", default=60, show_default=True, help="Of which the fastest counts.")
def main(rounds: int) -> None:
    """Measure, on this machine's CPU."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with ExitStack() as patched:
        patched.enter_context(mock.patch("torch.cuda.current_device", lambda: "cpu"))
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        on_cpu(patched)
        kinds: dict[str, Callable[[int], Any]] = {
            "own": megatron, "llama": llama, "whole": partial(training, shared=False),
            "shared": partial(training, shared=True), "twice": partial(training, shared=True, batches=2),
            "two experts": partial(megatron, experts=2), "four": partial(megatron, experts=4),
        }  # fmt: skip
        runs = {(kind, depth): made(depth) for kind, made in kinds.items() for depth in (SHALLOW, DEEP)}
        least: dict[tuple[str, int], tuple[float, ...]] = {}
        for _ in range(rounds):
            for key, run in runs.items():
                run()
                for taken in (run(), run()):
                    least[key] = tuple(map(min, least.get(key, taken), taken))

        parts = pieces(runs["two experts", DEEP], rounds)

    def layer(kind: str) -> list[float]:
        return [(deep - shallow) / (DEEP - SHALLOW) for deep, shallow in
                zip(least[kind, DEEP], least[kind, SHALLOW], strict=True)]  # fmt: skip

    def rest(kind: str) -> list[float]:
        return [both - SHALLOW * one for both, one in zip(least[kind, SHALLOW], layer(kind), strict=True)]

    grouped = [two - (four - two) / 2 for two, four in zip(layer("two experts"), layer("four"), strict=True)]
    ratios = [mine / dense for mine, dense in zip(grouped, layer("own"), strict=True)]
    whole = parts.pop("all") / layer("two experts")[0] * grouped[0]  # of one grouped matmul
    shares = {name: seconds / whole for name, seconds in parts.items()}
    own, plain, block = layer("own"), layer("llama"), TRANSFORMERS["rmsnorm"]
    for way, mine, theirs in zip(("forward", "backward"), own, plain, strict=True):
        print(f"{way}: {1e3 * mine:.2f} ms a layer, {mine / theirs:.2f} times transformers' {1e3 * theirs:.2f}")
    forward = plain[0] / (block.kernels + VIEW * block.views)
    backward = plain[1] / (block.kernels_back + VIEW * block.views_back)
    once, twice = rest("shared"), rest("twice")
    print(f"In operators of {1e6 * forward:.1f} us, in backward of {1e6 * backward:.1f}: a micro-batch beside layers "
          f"{(twice[1] - once[1]) / forward:.0f} and {(twice[2] - once[2]) / backward:.0f}")  # fmt: skip
    for kind in ("whole", "shared"):
        cleared, _, _, updated = (each / LAYER / forward for each in layer(kind))
        step = rest(kind)[0] + rest(kind)[3] - OTHERS * forward * (cleared + updated)
        step += sum(2 * each - both for each, both in zip(once[1:3], twice[1:3], strict=True))
        print(f"{kind}: a step {step / forward:.0f}; a parameter {cleared:.2f} set to zero, {updated:.1f} updated")
    print(f"experts in one: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times a layer; of its forward pass "
          f"{', '.join(f'{name} {share:.0%}' for name, share in shares.items())}")  # fmt: skip
    print(provenance("megatron-core", "torch", "transformers"), host().cpu)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
