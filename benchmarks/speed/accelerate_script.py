"""Accelerate's own FSDP2 benchmark, whose memory it published as pictures, as a script for the simulator.

The loop is that of benchmarks/fsdp2 in huggingface/accelerate (main.py, utils.py; "Optimizer After FSDP", whose curve
in the picture coincides with Accelerate's own): FSDP2 shards transformers' model block by block on its way to the card,
forward runs under autocast, the logits are in fp32, and AdamW has torch's defaults.
"""

from __future__ import annotations

import torch

import llmlab as lab
from llmlab.archive import figure

MODEL, CARD, RANKS = "Qwen2.5-1.5B", "H100-80GB", 8
BATCH, TOKENS = 2, 128


def train(steps: int = 2) -> None:
    """Take `steps` steps on "cuda"."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("nccl")
    config = AutoConfig.for_model(**lab.model(MODEL).config, use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    bf16 = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=bf16, output_dtype=bf16)
    inner = model.model
    for block in inner.layers:
        fully_shard(block.to_empty(device="cuda"), mp_policy=policy)
    for rest in (inner.embed_tokens, inner.norm, inner.rotary_emb, model.lm_head):
        rest.to_empty(device="cuda")
    model.tie_weights()
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    for _ in range(steps):
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", bf16):
            output = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
        output.logits = output.logits.float()
        output.loss.backward()
        optimizer.step()


def published() -> dict[str, int]:
    """Return the published peak in bytes."""
    return {"reserved": figure("accelerate-fsdp2-memory").values[f"{MODEL}, 8 GPUs: reserved"]}


def simulated() -> dict[str, int]:
    """Return the peak of rank 0, in bytes."""
    with lab.simulator(CARD, world_size=RANKS) as sim:
        train()
        return {"reserved": sim.peak_reserved}


def by_verb() -> dict[str, int]:
    """Return what lab.simulate says without a script; it reduces gradients in fp32."""
    run = lab.Training(micro_batch=BATCH, seq_len=TOKENS, precision="mixed-bf16", zero=3, dp=RANKS)
    return {"reserved": lab.simulate(MODEL, run, CARD).peak_reserved}
