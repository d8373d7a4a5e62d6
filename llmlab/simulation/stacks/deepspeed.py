"""A step of DeepSpeed's engine on fake tensors: transformers' model, ZeRO's own optimizers, and its fused Adam.

What is ours is the configuration and the loop, which is that of the project's getting started page: engine(...),
engine.backward(loss), engine.step() for each micro-batch. The logits stay until the step is over, as in any loop that
names the model's output.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.compat import symbol
from ...engines.configs import deepspeed_config
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...specs.stacks import DeepSpeed
from ...step.model import Around, build_model, materialize
from ...step.optimizer import LEARNING_RATE
from ...step.step import Enter, Step, ignore
from ..devices import HOST

OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion"}
# Of its optimizers: the fp32 weights that they step, at stage 0, at stage 1 with sums in fp32, at 1 and 2, and at 3.
MASTERS = (
    "fp32_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat",
)  # fmt: skip
QUIET = ("DeepSpeed", "deepspeed")  # its loggers


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of DeepSpeed: nothing that a run of it can ask for."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def _on_host(model: Any) -> None:
    """Give the model memory where a script has it until the engine moves it to the card."""
    materialize(model, HOST)


@dataclass
class DeepSpeedStep(Step):
    """A step as DeepSpeedEngine takes it."""

    engine: Any = None

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step: the engine counts its micro-batches, and updates after the last."""
        output = None
        with _quiet():
            for number, ids in enumerate(self.inputs, 1):  # (B, T)
                enter("forward")
                output = None  # the last micro-batch's logits go before this one's forward
                output = self.engine(input_ids=ids, labels=ids)
                enter("backward", logits=output.logits)  # (B, T, V)
                self.engine.backward(output.loss)
                if number == len(self.inputs):
                    enter("optimizer")
                self.engine.step()
        enter("optimizer")

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part, ZeRO's flat ones too."""
        parts, own = super().tensors(), self.engine.optimizer
        for name in MASTERS:
            parts["optimizer"] += getattr(own, name, [])
        shards = [parameter.ds_tensor for parameter in self.parameters or () if hasattr(parameter, "ds_tensor")]
        parts["weights"] += shards  # of stage 3, and their gradients
        parts["gradients"] += [own.grad_partitions_flat_buffer] if shards else []
        return parts


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of functions that a newer torch calls by other names, nor what memory bf16_optimizer.py prints."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)
        yield


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around
) -> DeepSpeedStep:
    """Return the step of `run` on `device`; the process group is there already."""
    model = build_model(spec, run, device, recomputing, shard=_on_host)
    stack = DeepSpeed.of(run)
    parameters = {"lr": LEARNING_RATE, **({"torch_adam": True} if stack.torch_adam else {})}
    settings = {
        **deepspeed_config(run), "gradient_clipping": 1.0,
        "optimizer": {"type": OPTIMIZERS[run.optimizer], "params": parameters},
    }  # fmt: skip
    initialize = symbol("deepspeed.initialize")
    with _quiet():
        if run.zero == 3:
            # As transformers loads under such a configuration: each parameter is shared as soon as it is made. Without
            # it the engine moves the whole model to the card first.
            symbol("deepspeed.init_distributed")()
            symbol("deepspeed.zero.Init")(module=model, config_dict_or_path=settings)
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=settings)
    ids = [torch.empty_like(tensor, device="cuda") for tensor in inputs]
    return DeepSpeedStep(
        run, device, model, ids, engine=engine, optimizer=engine.basic_optimizer, parameters=list(model.parameters())
    )
