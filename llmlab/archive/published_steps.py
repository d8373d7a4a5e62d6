"""Published times of training steps on many GPUs, with everything that a prediction of them needs."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..specs.run import Checkpointing, Training
from ..specs.stacks import Megatron
from .published import figure

KINDS: dict[Checkpointing, str] = {
    "full": "full recomputation",
    "selective": "selective recomputation, sequence parallel",
}


class PublishedStep(NamedTuple):
    """One published step: the `seconds` of `run` of the model `config`, on nodes of `card`s connected by `network`."""

    name: str
    config: dict[str, Any]
    run: Training
    card: str
    network: str
    seconds: float


class PublishedMFU(NamedTuple):
    """One published utilisation `mfu` of `run`."""

    name: str
    run: Training
    mfu: float


def gpt(
    hidden: int, layers: int, heads: int, vocab: int = 50368, seq_len: int = 2048, dropout: float = 0.0
) -> dict[str, Any]:
    """Return the config of a GPT-2-like model, with GELU as one operator, as trainers have it."""
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": vocab,
        "n_positions": seq_len, "activation_function": "gelu", "tie_word_embeddings": True, **rates,
    }  # fmt: skip


def megatron_iterations() -> list[PublishedStep]:
    """Return the eight iterations of Korthikanti et al. (arXiv 2205.05198, table 5), 22B to 1T on 8 to 512 A100s, and
    the 530B model's on 2240, data parallel. Attention is eager: its scores are in memory."""
    timed, setup = figure("recomputation-iteration-time"), figure("recomputation-iteration-setup")
    steps = []
    for size in ("22B", "175B", "530B", "1T"):
        of = {label.split(": ")[1]: int(value) for label, value in setup.values.items() if label.startswith(f"{size}:")}
        config = gpt(of["hidden"], of["layers"], of["heads"], 51200, 2048, 0.1)
        for kind, label in KINDS.items():
            run = megatron_run(of, kind)
            seconds = timed[f"{size}: {label}"]
            steps.append(
                PublishedStep(f"{size} {kind}", config, run, "A100-80GB", "InfiniBand-HDR", seconds)
            )
            if size == "530B" and kind == "selective":
                more = figure("recomputation-data-parallel-time")["2240 GPUs"]
                run = megatron_run(of, kind, dp=8)
                steps.append(PublishedStep("530B dp 8", config, run, "A100-80GB", "InfiniBand-HDR", more))
    return steps


def megatron_run(of: dict[str, int], kind: Checkpointing, dp: int = 1) -> Training:
    """Return the run of one row of table 5: `of` has its sizes and degrees by name, `kind` is one of KINDS.

    Megatron-LM of 2022 has its own kernels, and hides tensor parallelism's messages in backward alone: stages send in
    the open, and data parallelism after the last backward (`Megatron` says since when each is otherwise).
    """
    stack = Megatron(
        transformer_engine=False,
        virtual_pipeline=of["interleave"],
        overlap_grad_reduce=False,
        overlap_p2p_communication=False,
    )
    return Training(
        micro_batch=of["micro batch"],
        seq_len=2048,
        precision="mixed-bf16",
        attention="eager",
        checkpointing=kind,
        accumulation=of["global batch"] // of["micro batch"],
        tp=of["tensor parallel"],
        pp=of["pipeline parallel"],
        dp=dp,
        sequence_parallel=kind == "selective",
        stack=stack,
    )


def foundry_scaling() -> list[PublishedStep]:
    """Return llm-foundry's FSDP steps on 8 to 512 H100s. Its network is not named; NDR is what such nodes have.

    On 8 GPUs attention is Triton's kernel of the first FlashAttention (the table of commit b2a43a147), on more
    FlashAttention-2 (scripts/train/benchmarking/sweep.py at 5e85bd62d). Half weights are gathered from fp32 shards; the
    loss is flash-attn's, its models' default (llmfoundry/models/mpt/modeling_mpt.py).
    """
    sizes = {"7B": (4096, 32, 32, 6, 3), "3B": (2560, 32, 20, 8, 2), "1B": (2048, 24, 16, 12, 2)}
    steps = []
    for label, rate in figure("llm-foundry-scaling").values.items():
        size, cards = label.split(", ")
        hidden, layers, heads, micro_batch, zero = sizes[size]
        dp = int(cards.split()[0])
        run = Training(
            micro_batch=micro_batch, seq_len=2048, precision="mixed-bf16", kernels="fused-loss", zero=zero, dp=dp,
            attention="efficient" if dp == 8 else "flash",
        )  # fmt: skip
        config = gpt(hidden, layers, heads)
        steps.append(
            PublishedStep(f"{size} {dp}", config, run, "H100-80GB", "InfiniBand-NDR", micro_batch * 2048 / rate)
        )
    return steps


def llama_405b() -> list[PublishedMFU]:
    """Return Llama 3 405B's three stages of pre-training (arXiv 2407.21783, table 4), on H100s.

    Gradients and optimizer states are sharded, and parameters are not gathered a second time: ZeRO 1 here. Each virtual
    stage has one layer (the first and the last have none, section 3.3.2), so a rank has 128 / 16 of them.
    """
    of, reached = figure("llama-3-405b-mesh"), figure("llama-3-405b-mfu")
    return [
        PublishedMFU(
            name,
            Training(
                micro_batch=1,
                seq_len=int(name.split(", ")[1].split()[0]),
                precision="mixed-bf16",
                accumulation=int(of[f"{name}: batch"]),
                tp=int(of[f"{name}: TP"]),
                cp=int(of[f"{name}: CP"]),
                pp=int(of[f"{name}: PP"]),
                virtual_stages=8,
                dp=int(of[f"{name}: DP"]),
                zero=1,
                sequence_parallel=True,
            ),
            mfu,
        )
        for name, mfu in reached.values.items()
    ]
