"""llmlab: what training and running a language model costs, estimated, simulated, measured and compared.

    import llmlab as lab
    run = lab.Training(micro_batch=1, seq_len=1024, precision="autocast-bf16")
    lab.estimate("gpt2", run, "A100-80GB")      # formulas, no torch
    lab.simulate("gpt2", run, "A100-80GB")      # the real code on fake tensors, through the CUDA allocator
    lab.measure("gpt2", run)                    # the real step on this machine
    lab.compare("gpt2", run, "A100-80GB")       # side by side

Importing it imports neither torch nor matplotlib nor rich; plots need the extra llmlab[plot].
"""

from typing import Any

from .base.errors import NotAvailable, SpecError, UnknownName
from .base.version import __version__ as __version__
from .hardware.doctor import doctor
from .hardware.gpu import GPU, gpu, gpus
from .hardware.scale import scale
from .hardware.this_machine import host
from .notebook.widget import calculator
from .report import Comparison, Report
from .serving.service import Service
from .simulation.simulator import simulator
from .specs.experts import expert_imbalance
from .specs.model import ModelSpec, model, models
from .specs.run import Inference, LoRA, Training
from .specs.stacks import DeepSpeed, LitGPT, Megatron, Nanotron, Torchtitan, Torchtune
from .verbs import compare, estimate, explain, fix, measure, meter, plan, records, serve, simulate, solve, write

__all__ = [
    "GPU",
    "Comparison",
    "DeepSpeed",
    "Inference",
    "LitGPT",
    "LoRA",
    "Megatron",
    "ModelSpec",
    "Nanotron",
    "NotAvailable",
    "Report",
    "Service",
    "SpecError",
    "Torchtitan",
    "Torchtune",
    "Training",
    "UnknownName",
    "calculator",
    "compare",
    "doctor",
    "estimate",
    "expert_imbalance",
    "explain",
    "fix",
    "gpu",
    "gpus",
    "host",
    "measure",
    "meter",
    "model",
    "models",
    "plan",
    "records",
    "scale",
    "serve",
    "simulate",
    "simulator",
    "solve",
    "write",
]


def load_ipython_extension(shell: Any) -> None:
    """Add the cell magic `%%simulate GPU`, for `%load_ext llmlab`."""
    from .notebook.magic import load

    load(shell)
