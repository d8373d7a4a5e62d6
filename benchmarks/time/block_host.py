"""Measure what FSDP2's hooks, DTensor and checkpointing take of the host in a block, beside the block's own operators.

    PYTHONPATH=.:_build/stacks python -m benchmarks.time.block_host

The blocks are torchtitan's: whole, sharded by FSDP2, and divided as its apply_tp divides them too, over process groups
that send nothing; they are so small that only Python, the dispatcher and DTensor take time. What four more blocks add
is four blocks', without the embedding and the head. formulas/time/host.py has the differences. Checkpointing's is of
transformers' blocks: what they take longer, less what the operators that run again take at the block's own pace.

And what each parameter takes in a compiled graph and in AdamW's update, in operators of a Llama's forward pass, timed
in turns: guards and the autograd function forward, its gradient backward; of the update on lists what is Python, as a
CPU's operators on lists go tensor by tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.time.deepspeed_hooks import VIEW, llama, timed
from llmlab import Training
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.host import TRANSFORMERS as COUNTED
from llmlab.formulas.time.host import operators
from llmlab.specs.model import model as find_model
from llmlab.step.step import build_step, texts

RANKS, LAYERS, LENGTH = 2, (2, 6), 16  # ranks of each kind
WARM, ROUNDS = 5, 60
TURNS = 4  # in which the runs of parameters come again
TRANSFORMERS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
     "intermediate_size": 64, "vocab_size": 512, "max_position_embeddings": 64},
    {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "vocab_size": 512, "n_positions": 64},
)  # fmt: skip
PARAMETERS = 16, 144
SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128, "multiple_of": 16}


def passes(layers: int, kind: str) -> Callable[[], tuple[float, float]]:
    """Return a function that runs a model forward and backward, and returns the CPU's seconds of each."""
    from torchtitan.models.llama3.infra.parallelize import apply_tp
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    mesh = init_device_mesh("cpu", (RANKS, RANKS), mesh_dim_names=("dp", "tp"))
    model = Transformer(TransformerModelArgs(**SIZES, n_layers=layers, max_seq_len=LENGTH))
    if kind == "divided":
        apply_tp(model, mesh["tp"], loss_parallel=True, enable_float8_tensorwise_tp=False)
    for module in () if kind == "whole" else (*model.layers.values(), model):
        fully_shard(module, mesh=mesh["dp"])
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)

    def run() -> tuple[float, float]:
        start = time.thread_time()
        logits = model(tokens)
        forward = time.thread_time() - start
        loss = (logits.to_local() if isinstance(logits, DTensor) else logits).sum()
        start = time.thread_time()
        loss.backward()
        return forward, time.thread_time() - start

    return run


def milliseconds(kind: str) -> tuple[float, float]:
    """Return the milliseconds of a block, forward and backward: of each model the least of several."""
    few, many = (passes(layers, kind) for layers in LAYERS)
    times = [(few(), many()) for _ in range(WARM + ROUNDS)][WARM:]
    least = [[min(both[model][way] for both in times) for way in (0, 1)] for model in (0, 1)]
    forward, backward = (1e3 * (more - less) / (LAYERS[1] - LAYERS[0]) for less, more in zip(*least, strict=True))
    return forward, backward


def checkpointed(config: dict[str, Any], precision: str) -> tuple[float, float, float]:
    """Return the milliseconds of a transformers block, of one that is computed again, and of that what is no operator
    of it."""
    host, length = efficiency("A100-80GB"), "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    assert host
    least, counted = [], []
    for checkpointing in (None, "full"):
        run = Training(seq_len=LENGTH, precision=precision, optimizer="sgd", checkpointing=checkpointing)
        specs = [find_model({**config, length: layers}) for layers in LAYERS]
        few, many = (build_step(spec, run, "cpu", texts(spec, run)) for spec in specs)
        times = [[_seconds(step) for step in (few, many)] for _ in range(WARM + ROUNDS)][WARM:]
        least.append(1e3 * (min(t for _, t in times) - min(t for t, _ in times)) / (LAYERS[1] - LAYERS[0]))
        counted.append(operators(specs[0], run).seconds(host))
    once, again = least
    return once, again, again - once * counted[1] / counted[0]


class Scaled(nn.Module):
    """A vector times `count` others, one after another: a compiler makes one kernel of it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x * weight
        return x.sum()


def compiled(count: int) -> Callable[[], tuple[float, float]]:
    """Return a run of a compiled graph of so many parameters, whose gradients it makes anew."""
    model, x = Scaled(count), torch.ones(8)
    graph = torch.compile(model)

    def run() -> tuple[float, float]:
        for weight in model.weights:
            weight.grad = None
        return timed(lambda: graph(x), Tensor.backward)

    return run


def updated(count: int) -> Callable[[], tuple[float, float]]:
    """Return a run of AdamW's update of so many parameters on lists, and of its eight operators alone."""
    many = [[torch.ones(1) for _ in range(count)] for _ in range(4)]
    weights, gradients, first, second = many
    trained = [nn.Parameter(each) for each in weights]
    for weight, gradient in zip(trained, gradients, strict=True):
        weight.grad = gradient
    optimizer, corrections = torch.optim.AdamW(trained, foreach=True), [1.0] * count

    def operators_alone() -> None:  # torch/optim/adam.py, _multi_tensor_adam
        torch._foreach_mul_(weights, 0.99)
        torch._foreach_lerp_(first, gradients, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, corrections)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_addcdiv_(weights, first, roots, corrections)

    return lambda: timed(lambda: optimizer.step(), lambda _: operators_alone())


def of_parameters() -> tuple[float, float, float, float]:
    """Return the microseconds of an operator, and how many take as long as a parameter does: in a compiled graph,
    forward and backward, and in an update."""
    runs = [run(count) for run in (compiled, updated) for count in PARAMETERS] + [llama(depth) for depth in LAYERS]
    turns = [[[run() for _ in range(WARM + ROUNDS // TURNS)][WARM:] for run in runs] for _ in range(TURNS)]
    few, many, less, more, shallow, deep = ([min(each) for each in zip(*chain(*of), strict=True)]
                                           for of in zip(*turns, strict=True))  # fmt: skip
    count = PARAMETERS[1] - PARAMETERS[0]
    forward, backward = ((b - a) / count for a, b in zip(few, many, strict=True))
    whole, alone = ((b - a) / count for a, b in zip(less, more, strict=True))
    block = COUNTED["rmsnorm"]
    one = (deep[0] - shallow[0]) / (LAYERS[1] - LAYERS[0]) / (block.kernels + VIEW * block.views)
    return 1e6 * one, forward / one, backward / one, (whole - alone) / one


def _seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    """Print the milliseconds of a block, and what each kind takes more than the one before."""
    torch.set_num_threads(1)
    operator, *each = of_parameters()
    said = ", ".join(f"{many:.2f}" for many in each)
    print(f"a parameter in operators of {operator:.1f} us: compiled forward and backward, updated: {said}")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS**2)
    print(f"torch {torch.__version__}, milliseconds forward and backward")
    before = (0.0, 0.0)
    for kind in ("whole", "sharded", "divided"):
        found = milliseconds(kind)
        more = ", ".join(f"{now - then:.2f}" for now, then in zip(found, before, strict=True))
        print(f"{kind}: {found[0]:.2f}, {found[1]:.2f}; more: {more}")
        before = found
    distributed.destroy_process_group()
    for config, precision in product(TRANSFORMERS, ("autocast-bf16", "fp32")):
        once, again, more = checkpointed(config, precision)
        print(f"{config['model_type']}, {precision}: {once:.2f}; checkpointed {again:.2f}, of which Python {more:.2f}")


if __name__ == "__main__":
    main()
