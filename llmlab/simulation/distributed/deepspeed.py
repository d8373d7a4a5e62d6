"""DeepSpeed on the simulated GPU: its own engine, ZeRO's own optimizers, and stand-ins for its compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.nn import functional

from ...base.compat import check, symbol
from ...base.errors import NotAvailable
from ..streams import nothing
from ..values.placeholders import located

# Modules whose globals keep the process group, or objects created from it or under zero.Init.
KEEPING = (
    "comm.comm", "utils.groups", "runtime.activation_checkpointing.checkpointing", "runtime.zero.partition_parameters",
)  # fmt: skip
# By module: the builder of kernels that update tensors in place and allocate nothing. The states are created in Python,
# csrc/adam/multi_tensor_apply.cuh passes addresses by value, and csrc/adam/cpu_adam.cpp runs on the host.
IN_PLACE = {
    "adam.fused_adam": "FusedAdamBuilder", "adam.cpu_adam": "CPUAdamBuilder", "lion.fused_lion": "FusedLionBuilder",
    "lion.cpu_lion": "CPULionBuilder", "adagrad.cpu_adagrad": "CPUAdagradBuilder",
}  # fmt: skip
NOT_A_RANK = ("pipe.engine.PipelineEngine", "pipe.dualpipev.DualPipeVEngine", "hybrid_engine.DeepSpeedHybridEngine")
OTHER = "give deepspeed.initialize a model of another kind, with ZeRO 0 to 3"


class _InPlace:
    """A builder, and the kernels it builds."""

    def load(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return nothing


def _refused(what: str, instead: str) -> NotAvailable:
    return located(NotAvailable(f"{what} of DeepSpeed is not simulated; {instead}, or lab.measure it"))


def no_accelerator() -> AbstractContextManager:
    """Let DeepSpeed choose the host during its import, silently and without searching for compilers."""
    accelerator = symbol("deepspeed.accelerator.real_accelerator")
    host = symbol("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator")()
    return mock.patch.object(accelerator, "ds_accelerator", host)


@contextmanager
def deepspeed_engine() -> Iterator[None]:
    """Let DeepSpeed find the GPU, and its Adam find its kernels; at the end no process group remains."""
    check("deepspeed.engine")
    with ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        accelerator = symbol("deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator")()
        patch(symbol("deepspeed.accelerator.real_accelerator"), "ds_accelerator", accelerator)
        # Otherwise it searches for compilers when the process group is created.
        stack.enter_context(mock.patch.dict(vars(symbol("deepspeed.ops")), __compatible_ops__={}))
        # Their checks that all ranks have the same lists broadcast those of rank 0.
        patch(symbol("deepspeed.runtime.zero.utils"), "assert_lst_len_same_as_other_ranks", nothing)
        patch(symbol("deepspeed.runtime.zero.utils"), "get_lst_from_rank0", lambda mine: mine)
        for name in KEEPING:
            stack.enter_context(mock.patch.dict(vars(symbol(f"deepspeed.{name}"))))
        # zero.Init (ZeRO-3) replaces this function for good by one that saves more tensors for backward.
        patch(functional, "linear", functional.linear)
        for module, builder in IN_PLACE.items():
            patch(symbol(f"deepspeed.ops.{module}"), builder, _InPlace)
        for builder in ("builder.OpBuilder", "cpu.no_impl.NotImplementedBuilder"):
            patch(symbol(f"deepspeed.ops.op_builder.{builder}"), "load", _not_compiled)
        engine = symbol("deepspeed.runtime.engine.DeepSpeedEngine")
        patch(engine, "_configure_basic_optimizer", _without_muon(engine._configure_basic_optimizer))
        for name in NOT_A_RANK:
            patch(symbol(f"deepspeed.runtime.{name}"), "__init__", _no_engine(name.split(".")[-1]))
        yield


def _no_engine(name: str) -> Callable[..., None]:
    def init(*args: Any, **kwargs: Any) -> None:
        raise _refused(name, OTHER)

    return init


def _not_compiled(*args: Any, **kwargs: Any) -> None:
    """OpBuilder.load, which would compile kernels."""
    raise _refused("a compiled operator", "give it PyTorch's in its place, as torch.optim.AdamW")


def _without_muon(real: Callable[..., Any]) -> Callable[..., Any]:
    def configure(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer_name() == "muon":
            raise _refused("Muon, whose functions torch.compile fuses,", 'give it {"optimizer": {"type": "AdamW"}}')
        return real(self, *args, **kwargs)

    return configure
