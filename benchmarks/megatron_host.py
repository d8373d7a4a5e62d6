"""What Python of Megatron-LM takes of the CPU in a layer, beside a layer of transformers' Llama.

    PYTHONPATH=.:_build/stacks python benchmarks/megatron_host.py       # prints; half a minute

megatron-core's GPT of its own layers, in its DistributedDataParallel, on one process and tiny tensors: forks of the
random state, which need a card, and Apex's kernels are left out. Two depths, so that embedding and head are not
counted; the least CPU time of this thread in many rounds, in which both take turns: on a busy machine seconds double,
ratios stay. What follows is `MEGATRON` in llmlab/formulas/time/host.py: transformers' operators, times the ratios.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from deepspeed_hooks import Run, llama, timed
from provenance import provenance
from torch import Tensor, nn

from llmlab.hardware.this_machine import host

SHALLOW, DEEP = 4, 12
CORE = "megatron.core."


class Norm(nn.LayerNorm):
    """PyTorch's norm in the place of Apex's."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps)


def megatron(depth: int) -> Run:
    """Return a run of megatron-core's GPT of `depth` tiny layers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=depth, hidden_size=64, num_attention_heads=4, ffn_hidden_size=256, use_cpu_initialization=True,
        hidden_dropout=0.1, attention_dropout=0.1, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    gpt = GPTModel(config, layer, 128, 16, position_embedding_type="learned_absolute")
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
    ids, places, mask = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)[None], torch.zeros(1, 1, 8, 8).bool()

    def forward() -> Tensor:
        for parameter in model.parameters():
            parameter.grad_added_to_main_grad = False
        return model(ids, places, mask, labels=ids).mean()

    return lambda: timed(forward, Tensor.backward)


@click.command()
@click.option("--rounds", default=60, show_default=True, help="Of which the fastest counts.")
def main(rounds: int) -> None:
    """Measure, on this machine's CPU."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with ExitStack() as patched:
        patched.enter_context(mock.patch("torch.cuda.current_device", lambda: "cpu"))
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        whole = SimpleNamespace(fork=nullcontext)
        patched.enter_context(mock.patch(CORE + "tensor_parallel.get_cuda_rng_tracker", lambda: whole))
        patched.enter_context(mock.patch(CORE + "transformer.transformer_block.LayerNormImpl", Norm))
        runs = {(made, depth): made(depth) for made in (megatron, llama) for depth in (SHALLOW, DEEP)}
        least = dict.fromkeys(runs, (1.0, 1.0))
        for number in range(3 + rounds):
            for key, run in runs.items():
                taken = run()
                if number >= 3:
                    least[key] = min(least[key][0], taken[0]), min(least[key][1], taken[1])

    def layer(made: Callable[[int], Run]) -> list[float]:
        pairs = zip(least[made, DEEP], least[made, SHALLOW], strict=True)
        return [(deep - shallow) / (DEEP - SHALLOW) for deep, shallow in pairs]

    own, plain = layer(megatron), layer(llama)
    for way, mine, theirs in zip(("forward", "backward"), own, plain, strict=True):
        print(f"{way}: {1e3 * mine:.2f} ms a layer, {mine / theirs:.2f} times transformers' {1e3 * theirs:.2f}")
    print(provenance("megatron-core", "torch", "transformers"), host().cpu)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
