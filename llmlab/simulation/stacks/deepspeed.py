"""A step of DeepSpeed's engine on fake tensors: transformers' model, ZeRO's own optimizers, and its fused Adam.

What is ours is the configuration and the loop, which is that of the project's getting started page: engine(...),
engine.backward(loss), engine.step() for each micro-batch. The logits stay until the step is over, as in any loop that
names the model's output.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import symbol
from ...engines.configs import deepspeed_config
from ...specs.model import ModelSpec
from ...specs.run import Training
from ...step.model import Around, build_model, materialize
from ...step.step import Enter, Step, ignore
from ..devices import HOST

QUIET = ("DeepSpeed", "deepspeed")  # its loggers


def check(spec: ModelSpec, run: Training) -> None:
    """Raise NotAvailable for what is not simulated of DeepSpeed: nothing that a run of it can ask for."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass
class DeepSpeedStep(Step):
    """A step as DeepSpeedEngine takes it."""

    engine: Any = None

    def __call__(self, enter: Enter = ignore) -> None:
        """Take one step: the engine counts its micro-batches, and updates after the last."""
        output = None
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


def build(
    spec: ModelSpec, run: Training, device: torch.device, inputs: list[Tensor], recomputing: Around
) -> DeepSpeedStep:
    """Return the step of `run` on `device`; the process group is there already."""
    model = build_model(spec, run, device, recomputing, shard=lambda model: materialize(model, HOST))
    settings = {**deepspeed_config(run), "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    initialize = symbol("deepspeed.initialize")
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=settings)
    ids = [torch.empty_like(each, device="cuda") for each in inputs]
    return DeepSpeedStep(
        run, device, model, ids, engine=engine,
        parameters=list(model.parameters()),
    )

