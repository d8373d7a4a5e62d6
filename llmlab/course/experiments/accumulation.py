"""Gradient accumulation in Accelerate and in transformers' Trainer: the gradient that reaches the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..techniques.accumulation import count_targets, gradient, pad, summed_loss


def accelerate_gradient(model: nn.Module, sequences: Sequence[Tensor], steps: int, by_tokens: bool = False) -> Tensor:
    """Return the gradient of `model` after Accelerate's accumulate(), with one sequence per micro-batch.

    With `by_tokens`, the loop divides by the tokens of the whole group itself.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
    loader: Any = torch.utils.data.DataLoader(list(sequences), batch_size=1, collate_fn=pad)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(deepcopy(model), loader)
    tokens = sum(count_targets(pad([sequence])[1]) for sequence in sequences)
    for ids, labels in loader:
        with accelerator.accumulate(model):
            if by_tokens:  # backward() divides by `steps`, so multiply by it
                loss = summed_loss(model, ids, labels) * steps / tokens
            else:
                loss = model(input_ids=ids, labels=labels).loss
            accelerator.backward(loss)
    return gradient(model)


def trainer_gradient(model: nn.Module, sequences: Sequence[Tensor], steps: int) -> Tensor:
    """Return the gradient of `model` at the last update of transformers' Trainer, with one sequence per micro-batch."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    gradients: list[Tensor] = []

    class KeepGradient(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            parameters = kwargs["model"].parameters()
            gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=steps, num_train_epochs=1, use_cpu=True,
            max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        rows: Any = [{"input_ids": sequence, "labels": sequence} for sequence in sequences]
        trainer = Trainer(deepcopy(model), arguments, train_dataset=rows, callbacks=[KeepGradient()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return gradients[-1]
