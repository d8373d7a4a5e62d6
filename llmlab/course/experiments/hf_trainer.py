"""ZeRO with Hugging Face's Trainer and DeepSpeed: one script for every launcher.

    torchrun --nproc-per-node 2 -m llmlab.course.experiments.hf_trainer --stage 3
    accelerate launch --cpu --num_processes 2 -m llmlab.course.experiments.hf_trainer --stage 2
    deepspeed --num_accelerators 2 --module llmlab.course.experiments.hf_trainer --stage 1

On GPUs, leave --cpu out. A launcher starts the ranks and sets RANK, LOCAL_RANK and WORLD_SIZE for each of them; the
script does everything else. Stage 0 is torch's DDP, without DeepSpeed. Rank 0 prints one line of JSON for all ranks.
"""

from __future__ import annotations

import os
import tempfile

from ...base.errors import NotAvailable
from ...engines.configs import DEEPSPEED_COMMON
from .command import command
from .job import TINY_GPT


def deepspeed_config(stage: int) -> dict:
    """Return a configuration of DeepSpeed, in which "auto" stands for the value of the Trainer's argument."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        **DEEPSPEED_COMMON,  # with offloading, it allows torch's AdamW, which the Trainer creates
        "gradient_clipping": "auto",
    }


def train(stage: int, steps: int, micro_batch: int = 2) -> dict:
    """Train in this rank; return the loss of each step and the bytes of parameters on the rank."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ...data import tokens, windows
    from .engines import local, quiet_deepspeed

    on_cpu = not torch.cuda.is_available()
    if stage and on_cpu:
        quiet_deepspeed()
    torch.manual_seed(0)
    config = GPT2Config(**TINY_GPT, bos_token_id=0, eos_token_id=0)
    world, length = int(os.environ.get("WORLD_SIZE", 1)), TINY_GPT["n_positions"]
    ids = windows(tokens(TINY_GPT["vocab_size"]), steps * micro_batch * world, length, 0)  # (rows, T)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=micro_batch,
            max_steps=steps,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu else None,
            deepspeed=deepspeed_config(stage) if stage else None,
        )
        rows = [{"input_ids": row, "labels": row} for row in ids]
        model = GPT2LMHeadModel(config)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    resident_bytes = local(getattr(p, "ds_tensor", p) for p in model.parameters())
    return {"rank": int(os.environ.get("RANK", 0)), "world": world, "losses": losses, "parameters": resident_bytes}


def gather_results(mine: dict) -> list[dict] | None:
    """Return the results of all ranks on rank 0, which prints them alone, and None on the other ranks.

    All ranks leave the process group, because a rank that exits inside it can stop the others.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return [mine]
    results: list = [None] * dist.get_world_size()
    dist.all_gather_object(results, mine)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return results if first else None


def main(arguments: list[str] | None = None, name: str = "hf_trainer") -> None:
    """The command line, which every launcher starts in each rank."""

    def run(stage: int, steps: int, local_rank: int | None) -> list[dict] | None:
        if "WORLD_SIZE" not in os.environ:
            raise NotAvailable(
                f"stage={stage} without a launcher: WORLD_SIZE, which says how many ranks train, is not set; give the "
                f"number to one, as in torchrun --nproc-per-node 2 -m {__package__}.hf_trainer --stage {stage}"
            )
        return gather_results(train(stage, steps))

    options = {
        "--stage": (2, None, {"choices": range(4)}),
        "--steps": (3, None),
        "--local_rank": (int, "older launchers give it; RANK says the same"),
    }
    command(name, None, options, run, arguments)


if __name__ == "__main__":
    main()
