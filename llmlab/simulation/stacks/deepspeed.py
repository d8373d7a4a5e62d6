"""A step of DeepSpeed's engine on fake tensors: transformers' model, ZeRO's own optimizers, and its fused Adam.

Only the configuration and the loop are ours. The loop is that of DeepSpeed's getting started page: engine(...),
engine.backward(loss), engine.step() for each micro-batch. The logits stay alive until the step is over, as in any loop
that assigns the model's output to a variable.
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
# The fp32 weights of its optimizers: at stage 0, at stage 1 with fp32 accumulation, at stages 1 and 2, and at stage 3.
MASTERS = (
    "fp32_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat",
)  # fmt: skip
QUIET = ("DeepSpeed", "deepspeed")  # its loggers


def check(spec: ModelSpec, run: Training) -> None:
    """Silence DeepSpeed's loggers; all options of a run with DeepSpeed are simulated."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def _on_host(model: Any) -> None:
    """Materialize the model on the host, where a script has it until the engine moves it to the GPU."""
    materialize(model, HOST)


@dataclass
class DeepSpeedStep(Step):
    """A training step of DeepSpeedEngine."""

    engine: Any = None

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step: the engine counts its micro-batches, and updates after the last."""
        output = None
        with _quiet():
            for number, ids in enumerate(self.inputs, 1):  # (B, T)
                enter("forward")
                output = None  # free the previous logits before this forward pass
                output = self.engine(input_ids=ids, labels=ids)
                enter("backward", logits=output.logits)  # (B, T, V)
                self.engine.backward(output.loss)
                if number == len(self.inputs):
                    enter("optimizer")
                self.engine.step()
        enter("optimizer")

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part, including ZeRO's flat buffers."""
        parts, optimizer = super().tensors(), self.engine.optimizer
        for name in MASTERS:
            parts["optimizer"] += getattr(optimizer, name, [])
        shards = [parameter.ds_tensor for parameter in self.parameters or () if hasattr(parameter, "ds_tensor")]
        parts["weights"] += shards  # of stage 3, and their gradients
        parts["gradients"] += [optimizer.grad_partitions_flat_buffer] if shards else []
        return parts


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings about functions that newer torch renamed, and the memory that bf16_optimizer.py prints."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", FutureWarning)
        yield


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around
) -> DeepSpeedStep:
    """Return the step of `run` on `device`; the process group exists already."""
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
            # transformers loads a model like this under such a configuration, and zero.Init shards it.
            # Otherwise the engine would move the whole model to the GPU first.
            symbol("deepspeed.init_distributed")()
            symbol("deepspeed.zero.Init")(module=model, config_dict_or_path=settings)
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=settings)
    ids = [torch.empty_like(tensor, device="cuda") for tensor in inputs]
    return DeepSpeedStep(
        run, device, model, ids, engine=engine, optimizer=engine.basic_optimizer, parameters=list(model.parameters())
    )
