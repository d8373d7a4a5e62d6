"""Measure what an operator takes of the host when autograd records nothing, relative to one in a training forward pass.

    python -m benchmarks.time.generation_host  # prints the ratio of several rounds; about a minute

transformers' Llama on tiny tensors, two depths, so that only blocks count: a forward pass that records for backward,
the same pass under no_grad, and generate() with its DynamicCache. Each is the least CPU time of this thread in many
runs that take turns. The counts of operators are tested in tests/formulas/test_host.py. UNRECORDED in
llmlab/formulas/time/host.py follows from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.provenance import provenance

SHALLOW, DEEP, ROUNDS, TURNS = 2, 10, 5, 40
SHORT, LONG = 4, 20  # tokens generated
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64,
         "vocab_size": 64, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def runs(layers: int) -> dict[str, Callable[[], object]]:
    """Return the passes of a model with `layers` blocks."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, num_hidden_layers=layers)).eval()
    ids = torch.zeros(1, 4, dtype=torch.long)

    def forward() -> Tensor:
        return model(ids, use_cache=False).logits

    def generate(new: int) -> Callable[[], Tensor]:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return {"recorded": forward, "no_grad": torch.no_grad()(forward), "short": generate(SHORT), "long": generate(LONG)}


def main() -> None:
    torch.set_num_threads(1)
    few, many = runs(SHALLOW), runs(DEEP)
    for _ in range(ROUNDS):
        passes = {(name, depth): run for depth, kinds in ((SHALLOW, few), (DEEP, many)) for name, run in kinds.items()}
        times = [[seconds(run) for run in passes.values()] for _ in range(TURNS)]
        least = dict(zip(passes, map(min, zip(*times, strict=True)), strict=True))
        block = {name: (least[name, DEEP] - least[name, SHALLOW]) / (DEEP - SHALLOW) for name in few}
        token = (block["long"] - block["short"]) / (LONG - SHORT)
        us = {name: f"{1e6 * block[name]:.0f}" for name in ("recorded", "no_grad")}
        print(f"microseconds of a block: recorded {us['recorded']}, no_grad {us['no_grad']} "
              f"({block['no_grad'] / block['recorded']:.2f} of it), in generate() {1e6 * token:.0f}")  # fmt: skip
    print(provenance("torch", "transformers"))


if __name__ == "__main__":
    main()
