"""Monkeypatches of PyTorch's dispatcher and of transformers, undone afterwards.

Some operators differ between CPU and CUDA above autograd (dropout, softmax, attention). They are replaced in the
dispatcher, so the replacement also applies when checkpointing recomputes inside the backward pass; a TorchFunctionMode
would not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...base.compat import (
    VF,
    AutoDispatchBelowAutograd,
    DispatchKey,
    FakeTensor,
    FunctionalTensor,
    disable_current_modes,
    has,
    symbol,
)
from ..capability import Capability
from ..devices import GPU_DEVICE, HOST
from ..engine.engine import Engine
from ..values.known import forget, know, known
from ..values.placeholders import refuse, warn_of
from .autocast import CAST_ONLY, impl_cuda_autocast
from .sdpa import attention
from .sync_batch_norm import FAKE_KERNELS

aten = torch.ops.aten
COMPOSITE = DispatchKey.CompositeImplicitAutograd


@contextmanager
def fake_parameters() -> Iterator[None]:
    """Let modules and libraries accept fake parameters like real ones."""
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(library._destroy)
        library.impl("linear", _linear, "AutogradCPU")
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist))
        try:
            from transformers import masking_utils
        except ImportError:
            pass
        else:
            if has("transformers.masking_utils.is_tracing"):
                real = masking_utils.is_tracing
                # Fake inputs do not mean tracing here, because positions have values (values/known.py).
                not_fake = lambda tensor=None: real()  # noqa: E731
                stack.enter_context(mock.patch.object(masking_utils, "is_tracing", not_fake))
        yield


def _tolist(tensor: Tensor) -> Any:
    """Return the values of a fake tensor as lists."""
    value = known(tensor)
    if value is None:
        raise refuse("Tensor.tolist", "reads values")
    with disable_current_modes():
        return value.tolist()


def no_end_of_sequence() -> AbstractContextManager:
    """Let generate() of transformers draw no end-of-sequence token, so each sequence reaches its maximum length."""
    from transformers.generation.stopping_criteria import EosTokenCriteria

    real = EosTokenCriteria.__call__

    def call(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Tensor:
        return _zeros_where_unknown(real(self, input_ids, *args, **kwargs))

    return mock.patch.object(EosTokenCriteria, "__call__", call)


def full_beams() -> AbstractContextManager:
    """Let beam search of transformers run until its stopping criteria end it, with a token at every position."""
    from transformers.generation.utils import GenerationMixin as mixin

    unfinished = getattr(mixin, "_beam_search_has_unfinished_sequences", None)
    update = getattr(mixin, "_update_finished_beams", None)
    if unfinished is None or update is None:  # an older or newer transformers
        return nullcontext()

    def has_unfinished(improvable: Tensor, finished: Tensor, stopped: Tensor, *args: Any) -> Tensor:
        if not isinstance(stopped, FakeTensor):
            return unfinished(improvable, finished, stopped, *args)
        return ~torch.all(stopped)

    def update_finished(self: Any, *args: Any, **kwargs: Any) -> tuple:
        sequences, scores, indices, *rest = update(self, *args, **kwargs)
        return sequences, scores, _zeros_where_unknown(indices), *rest  # -1 would mean a position without a token

    replaced: dict[str, Any] = {
        "_beam_search_has_unfinished_sequences": staticmethod(has_unfinished),
        "_update_finished_beams": update_finished,
    }
    return mock.patch.multiple(mixin, **replaced)


def drawn_tokens() -> AbstractContextManager:
    """Let scripts read the result of generate() of transformers: every token is the smallest id that is not special."""
    from transformers.generation.utils import GenerationMixin as mixin

    real = mixin.generate

    @wraps(real)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        sequences = getattr(result, "sequences", result)
        if not isinstance(sequences, FakeTensor) or known(sequences) is not None:
            return result
        config = kwargs.get("generation_config") or self.generation_config
        special: set[int | None] = set()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = kwargs.get(name, getattr(config, name))
            special.update(ids if isinstance(ids, (list, tuple)) else [ids])
        warn_of("generate()")
        _zeros_where_unknown(sequences, next(number for number in count() if number not in special))
        return result

    return mock.patch.object(mixin, "generate", generate)


def _zeros_where_unknown(tensor: Tensor, zero: int = 0) -> Tensor:
    if isinstance(tensor, FakeTensor) and known(tensor) is None:
        with disable_current_modes():
            know(tensor, torch.full(tuple(tensor.shape), zero, dtype=tensor.dtype))
    return tensor


def note_recurrent_layers(engine: Engine) -> AbstractContextManager:
    """Note for nn.LSTM, GRU and RNN on the GPU that cuDNN runs each as one kernel, whose buffers are unknown."""

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(VF, name)

        def layer(x: Tensor, *args: Any) -> Any:
            if on_gpu(x):
                engine.uncounted.setdefault("cuDNN", f"torch.{name} (one cuDNN kernel, simulated as several operators)")
            return real(x, *args)

        return layer

    layers: dict[str, Any] = {name: noted(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    return mock.patch.multiple(VF, **layers)


@contextmanager
def cuda_operators(capability: Capability) -> Iterator[None]:
    """Let operators above autograd, and libraries that check the device, behave as on a GPU of this `capability`."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "dropout": _dropout,
        "softmax.int": _softmax(aten.softmax.int, aten._softmax.default),
        "log_softmax.int": _softmax(aten.log_softmax.int, aten._log_softmax.default),
        "scaled_dot_product_attention": _attention(capability),
        "_fused_rms_norm": _rms_norm,
    }
    optimizers = import_module("torch.optim.optimizer")  # torch.optim has an attribute of the same name
    foreach = optimizers._get_foreach_kernels_supported_devices
    with ExitStack() as stack:
        stack.callback(library._destroy)
        for name, kernel in kernels.items():
            library.impl(name, kernel, "AutogradCPU")
        for name, kernel in FAKE_KERNELS.items():
            library.impl(name, kernel, "Meta")
        impl_cuda_autocast(library, on_gpu)
        patched = lambda: [*foreach(), "cpu"]  # noqa: E731
        stack.enter_context(mock.patch.object(optimizers, "_get_foreach_kernels_supported_devices", patched))
        capturable = optimizers._get_capturable_supported_devices
        also = lambda *args, **kwargs: [*capturable(*args, **kwargs), "cpu"]  # noqa: E731
        for module in [sys.modules[name] for name in sys.modules if name.startswith("torch.optim.")]:
            if hasattr(module, "_get_capturable_supported_devices"):
                stack.enter_context(mock.patch.object(module, "_get_capturable_supported_devices", also))
            if default := getattr(module, "_default_to_fused_or_foreach", None):
                choose = _foreach_on_gpu(default)
                stack.enter_context(mock.patch.object(module, "_default_to_fused_or_foreach", choose))
        for module in (optimizers, symbol("torch.utils._foreach_utils")):  # clip_grad_norm_ uses the second
            types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
        yield


def _foreach_on_gpu(default: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
    """Return torch's choice of an optimizer's kernels, which updates lists of tensors only on the GPU: to torch, both
    devices are a CPU."""

    @wraps(default)
    def choose(params: list[Any], *args: Any, **kwargs: Any) -> tuple[bool, bool]:
        fused, foreach = default(params, *args, **kwargs)
        return fused, foreach and all(p is None or on_gpu(p) for p in params)

    return choose


def made_on_gpu(
    make: Callable[..., Tensor], data: Any, *args: Any, requires_grad: bool = False, **kwargs: Any
) -> Tensor:
    """Return a tensor of `make`, such as torch.tensor, on the GPU: created on the host and copied, as on CUDA."""
    tensor = make(data, *args, **{**kwargs, "device": None if isinstance(data, Tensor) else HOST})
    if tensor.numel() or not isinstance(tensor, FakeTensor):
        tensor = tensor.to(GPU_DEVICE)
    else:  # `to` does not move a fake tensor without elements
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU_DEVICE)
    return tensor.requires_grad_() if requires_grad else tensor


def tensors_on_gpu() -> AbstractContextManager:
    """Let torch.tensor create tensors on the GPU; for "cpu:0" torch itself would create them on the host. Scalars in
    fake tensors are read, as torch reads those in real tensors."""
    symbol("torch.utils._device._device_constructors")()  # its first call is cached, and must see torch's own function
    real = torch.tensor

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        on_gpu = kwargs.get("device") is not None and torch.device(kwargs["device"]) == GPU_DEVICE
        data = _numbers(data)
        return made_on_gpu(real, data, **kwargs) if on_gpu else real(data, **kwargs)

    return mock.patch.object(torch, "tensor", tensor)


def _numbers(data: Any) -> Any:
    if type(data) in (list, tuple):
        return [_numbers(item) for item in data]
    return _tolist(data) if isinstance(data, FakeTensor) and not data.dim() and known(data) is not None else data


def count_random_states(engine: Engine) -> AbstractContextManager:
    """Count the states of the CPU generator, which checkpointing saves for each block, as simulated CPU memory."""
    real = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = real()
        engine.hold(state)
        return state

    return mock.patch.object(torch, "get_rng_state", get_rng_state)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether `tensor` is fake and on the simulated GPU, also while AOTAutograd traces it. For a DTensor, this
    rank's part decides."""
    part = tensor if isinstance(tensor, (FakeTensor, FunctionalTensor)) else getattr(tensor, "_local_tensor", None)
    return isinstance(part, (FakeTensor, FunctionalTensor)) and part.device == GPU_DEVICE


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """native/Linear.cpp: the bias is added in place if the input is not contiguous and no tensor subclass."""
    if weight is CAST_ONLY:
        return x
    if bias is None or x.dim() == 2 or x.is_contiguous() or type(x) is not FakeTensor:
        return aten.linear.default._op_dk(COMPOSITE, x, weight, bias)
    return torch.matmul(x, weight.t()).add_(bias)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """native/Dropout.cpp: on CUDA dropout is one kernel, whose mask needs 1 byte per element."""
    if not on_gpu(x) or not 0 < p < 1 or not train or not x.numel():
        return aten.dropout.default._op_dk(COMPOSITE, x, p, train)
    return aten.native_dropout(x, p, train)[0]


def _softmax(composite: Any, kernel: Any) -> Callable[..., Tensor]:
    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """native/SoftMax.cpp: on CUDA the kernel itself converts fp16 to fp32; other casts come first, as on a CPU."""
        if on_gpu(x) and x.dtype == torch.float16 and dtype == torch.float32:
            return kernel(x, dim, True)
        return composite._op_dk(COMPOSITE, x, dim, dtype)

    return softmax


class _FusedRMSNorm(torch.autograd.Function):
    """native/layer_norm.cpp: the operator that F.rms_norm calls; it has no CPU kernel, and so no backward on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple:
        with AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
        x, weight, rstd = ctx.saved_tensors
        output_mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with AutoDispatchBelowAutograd():
            dx, dweight = aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, output_mask)
        return dx, None, dweight, None


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    if not on_gpu(x):
        return aten._fused_rms_norm.default._op_dk(COMPOSITE, x, shape, weight, eps)
    return _FusedRMSNorm.apply(x, shape, weight, eps)


def _attention(capability: Capability) -> Callable[..., Tensor]:
    composite = aten.scaled_dot_product_attention.default

    def sdpa(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not on_gpu(query):
            return composite._op_dk(COMPOSITE, query, *args, **kwargs)
        return attention(capability, query, *args, **kwargs)

    return sdpa


_module_apply = nn.Module._apply


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which would swap fake parameters and cannot.

    A real parameter that moves to a device keeps its identity through `.data =`, unless it was on the meta device.
    """
    for module in self.children() if recurse else ():
        module._apply(fn)
    tensors = [tensor for tensor in (*self._parameters.values(), *self._buffers.values()) if tensor is not None]
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return _module_apply(self, fn, False)
    for name, parameter in self._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = fn(parameter)
        if parameter.is_meta != applied.is_meta or not isinstance(parameter, FakeTensor):
            self._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
        elif applied is not parameter:
            set_data(parameter, applied)
        if parameter.grad is not None:
            with torch.no_grad():
                set_data(parameter.grad, fn(parameter.grad))
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def set_data(tensor: Any, data: Tensor) -> None:
    """`tensor.data = data` for a fake tensor, which also updates the attributes for its device and its values."""
    tensor.data = data
    if isinstance(data, FakeTensor):
        tensor.fake_device = data.device
    if (value := known(data)) is not None:
        know(tensor, value)
    elif known(tensor) is not None:
        forget(tensor)
