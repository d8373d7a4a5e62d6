"""Linear layers that hold NF4 or int8 weights, loaded one at a time so that the model is never whole in 16 bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..base.compat import check
from ..base.errors import NotAvailable
from ..formulas.memory.precision import NF4_BLOCK

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _other_than(words: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: words not in str(record.msg)


# Said at import, and at each product: that an optional CPU kernel is not installed, that int8 products are in fp16.
for _module, _words in (("backends.cpu.ops", "kernels-community"), ("autograd._functions", "inputs will be cast")):
    logging.getLogger(f"bitsandbytes.{_module}").addFilter(_other_than(_words))


QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}  # of a weight, without its scales
HOST = torch.device("cpu")  # the simulated GPU is another device: "cpu:0"
LoadOrder = Callable[[list[int]], Iterable[tuple[int, bool]]]  # of sizes in elements: which tensor, and whether taken


def one_at_a_time(sizes: list[int]) -> Iterator[tuple[int, bool]]:
    """Yield what loading does with tensors of `sizes` elements: each is read (False), then taken into the model (True).

    transformers/core_model_loading.py, convert_and_load_state_dict_in_model, where it quantizes.
    """
    for index in range(len(sizes)):
        yield index, False
        yield index, True


def quantize_linears(
    model: PreTrainedModel, quantization: str, compute: torch.dtype, device: torch.device,
    load_order: LoadOrder = one_at_a_time, double_quant: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Return `model`, given on the meta device, with random weights on `device`, bitsandbytes' form in its linears.

    As `from_pretrained` with a BitsAndBytesConfig does it, and in its order, on which a GPU's reserved bytes depend:
    every linear but the output head, a classifier's too; "nf4" with its scales quantized too if `double_quant`
    (Dettmers et al., arXiv 2305.14314), products in `compute`; "int8" with outliers above 6 kept apart (arXiv
    2208.07339). What no checkpoint holds stays on meta.
    `load_order` says when a tensor is read and when it is taken into the model, as `one_at_a_time` does.
    Raises NotAvailable for layers that bitsandbytes has no NF4 products for on a CPU.
    """
    check("transformers.integrations.bitsandbytes")
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig
    from transformers.integrations import bitsandbytes as integration

    output = model.get_output_embeddings()
    head = [name for name, module in model.named_modules() if module is output]
    last = [name.removesuffix(".weight") for name, _ in model.named_parameters()][-1:]  # a classifier's head
    wanted = BitsAndBytesConfig(
        load_in_4bit=quantization == "nf4", load_in_8bit=quantization == "int8",
        bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=double_quant,
    )  # fmt: skip
    skipped = [*head, *last]
    model = integration.replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=wanted)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, kinds)}
    odd = [linear.in_features for linear in linears.values() if linear.in_features % NF4_BLOCK]
    if quantization == "nf4" and device == HOST and odd:
        raise NotAvailable(
            f"on a CPU bitsandbytes multiplies nf4 weights in whole blocks of {NF4_BLOCK}, and a layer has "
            f"{odd[0]} inputs; use a GPU, or sizes divisible by {NF4_BLOCK}"
        )
    tied = {f"{name}.weight" for name in head} if getattr(model.config, "tie_word_embeddings", False) else set()
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    if device != HOST:
        bits = {name: QUANTIZED_BYTES[quantization] for name in linears}
        _warm_up(sum(tensor.numel() * bits.get(name, tensor.element_size()) for name, tensor in stored.items()), device)
    convert = (integration.Bnb4bitQuantize if quantization == "nf4" else integration.Bnb8bitQuantize)(None).convert
    _load(model, linears, stored, convert, compute, device, load_order)
    model.tie_weights()  # a tied head has the embedding that was loaded, and takes no memory
    for linear in linears.values():
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    setattr(model, "is_loaded_in_4bit" if quantization == "nf4" else "is_loaded_in_8bit", True)  # peft looks here
    return model


def _load(
    model: PreTrainedModel, linears: dict[str, Any], stored: dict[str, torch.Tensor], convert: Callable[..., Any],
    compute: torch.dtype, device: torch.device, load_order: LoadOrder,
) -> None:  # fmt: skip
    """Put the tensors that a checkpoint has `stored` into the model, `linears` by `convert`, in this order."""
    from transformers.core_model_loading import dot_natural_key

    std = getattr(model.config, "initializer_range", None) or 0.02
    names = sorted(stored, key=dot_natural_key)
    read: dict[int, torch.Tensor] = {}
    for index, done in load_order([stored[name].numel() for name in names]):
        name = names[index]
        place, _, own = name.rpartition(".")
        owner: Any = model.get_submodule(place)
        if not done:
            shape = stored[name].shape
            if name in linears and owner.source_cls is not nn.Linear:  # Conv1D, whose checkpoint holds (in, out)
                shape = shape[::-1]
            dtype = compute if name in linears else stored[name].dtype
            read[index] = torch.empty(shape, dtype=dtype, device=device)
        elif name not in linears:
            value = read.pop(index)
            setattr(owner, own, nn.Parameter(value) if own in owner._parameters else value)
            del value
        else:
            read[index].normal_(std=std)
            owner.weight = convert({name: [read[index]]}, full_layer_name=name, model=model)[name]
            del read[index]  # before the next one is read
            for made in (owner, owner.weight):
                made._is_hf_initialized = True  # or initialize_weights would draw into the quantized bytes


def _warm_up(size: float, device: torch.device) -> None:
    """Take `size` bytes and give them back, so that the weights come to lie in one segment.

    transformers/modeling_utils.py, caching_allocator_warmup. It asks for less where that would leave under 1.2 GiB.
    """
    try:
        torch.empty(int(size // 2), dtype=torch.float16, device=device)
    except (torch.OutOfMemoryError, MemoryError):
        return  # the weights will find out
