"""The optimizer that a run names, from the library that its users take it from.

sgd, adamw and adafactor are PyTorch's (torch.optim.SGD without momentum, AdamW, Adafactor), with their defaults: on a
GPU that means foreach, on a CPU one parameter at a time. adamw-fused is AdamW as one kernel. adamw-8bit and lion are
bitsandbytes'. muon is torch.optim.Muon for the matrices of blocks, one after the other, and AdamW for all other
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.errors import NotAvailable
from ..specs.run import Training

LEARNING_RATE = 1e-4
TORCH_OPTIMIZERS: dict[str, Any] = {  # classes, and one with its option
    "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adamw-fused": partial(torch.optim.AdamW, fused=True),
    "adafactor": torch.optim.Adafactor,
}  # fmt: skip
# Of a step whose optimizer is offloaded, as course/techniques/offload.py does it.
OFFLOAD_PRECISIONS = ("fp32", "autocast-bf16", "mixed-bf16")  # a scaler would have to look into the host's gradients
ELEMENTWISE = ("sgd", "adamw", "adamw-fused")  # they treat every element alike, so a flat bucket is as good


class MuonWithAdamW(Optimizer):
    """Muon steps `matrices`, then AdamW the `rest`; to what steps, scales and counts it looks like one optimizer."""

    def __init__(self, matrices: list[nn.Parameter], rest: list[nn.Parameter], fused: bool | None) -> None:
        # The rate of AdamW serves both: each matrix's update is as large as AdamW's is (arXiv 2502.16982, section 2.2).
        muon = torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw")
        self.both: list[Optimizer] = [muon, torch.optim.AdamW(rest, lr=LEARNING_RATE, fused=fused)]
        self.param_groups = [group for optimizer in self.both for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of both, by parameter."""
        return {parameter: state for optimizer in self.both for parameter, state in optimizer.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for optimizer in self.both:
            optimizer.zero_grad(set_to_none)


def in_blocks(model: nn.Module) -> list[bool]:
    """Return of each parameter that is trained whether Muon steps it: a matrix, of no embedding and not of the head."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    tables = {id(parameter) for module in (*embeddings, head) for parameter in module.parameters()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter.ndim == 2 and id(parameter) not in tables for parameter in trained]


def build_muon(parameters: list[nn.Parameter], matrices: list[bool], fused: bool | None) -> MuonWithAdamW:
    """Return the optimizer of `parameters`, of which `matrices` says what Muon steps.

    Raises NotAvailable where torch has no Muon: before 2.9."""
    if not hasattr(torch.optim, "Muon"):
        raise NotAvailable(f"optimizer='muon' needs torch 2.9 or newer, and {torch.__version__} is installed; give "
                           "adamw")  # fmt: skip
    chosen = [parameter for parameter, muon in zip(parameters, matrices, strict=True) if muon]
    rest = [parameter for parameter, muon in zip(parameters, matrices, strict=True) if not muon]
    return MuonWithAdamW(chosen, rest, fused)


def build_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer `name` over `parameters`; its states come into being in its first step.

    Raises NotAvailable where bitsandbytes is asked for and not installed.
    """
    parameters = list(parameters)
    if name in TORCH_OPTIMIZERS:
        return TORCH_OPTIMIZERS[name](parameters, lr=LEARNING_RATE)
    if find_spec("bitsandbytes") is None:
        raise NotAvailable(
            f"optimizer={name!r} needs bitsandbytes, which is not installed: pip install 'llmlab[quant]', "
            "or give sgd, adamw or adafactor"
        )
    from bitsandbytes import optim

    return {"adamw-8bit": optim.AdamW8bit, "lion": optim.Lion}[name](parameters, lr=LEARNING_RATE)


def check_offload(run: Training, on_gpu: bool, verb: str) -> None:
    """Raise NotAvailable for an offloaded step that does not run; `verb` is who asks, `on_gpu` whether for a GPU."""
    choice = f"{verb} does not support offload={run.offload!r}"
    if not on_gpu:
        raise NotAvailable(f"{choice} on the CPU, whose memory is the host memory; name a GPU")
    if run.offload != "optimizer":
        raise NotAvailable(f"{choice}, only 'optimizer'; ask lab.estimate")
    for name, allowed in (("precision", OFFLOAD_PRECISIONS), ("optimizer", ELEMENTWISE)):
        if getattr(run, name) not in allowed:
            raise NotAvailable(f"{choice} with {name}={getattr(run, name)!r}; give {', '.join(allowed)}")
