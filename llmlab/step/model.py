"""The real model of a run: the transformers class with random weights, in the precision and form the run asks for.

Conventions of the published T4 rows (see `lab.records`) hold here too: adapters in fp32, dropout as in the model's
configuration, checkpointing without re-entrance, quantized models prepared by peft.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..base.compat import check, symbol
from ..base.errors import NotAvailable, SpecError
from ..course.techniques.checkpointing import KEPT_OPERATORS
from ..specs.check import ALL_LINEAR
from ..specs.generic import auto_class, release
from ..specs.model import ModelSpec
from ..specs.run import Inference, LoRA, Run, Training
from .fused_loss import causal_loss
from .methods import score_tokens
from .quantized import QUANTIZED_BYTES, LoadOrder, one_at_a_time, quantize_linears

if TYPE_CHECKING:
    from peft import PeftMixedModel, PeftModel
    from transformers import PreTrainedModel

    Model = PreTrainedModel | PeftModel | PeftMixedModel  # the adapters' wrapper hands on what it does not know

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
IMPLEMENTATIONS = {"eager": "eager", "sdpa": "sdpa", "flash": "flash_attention_2", "efficient": "sdpa"}
Around = Callable[[], AbstractContextManager]


def weight_dtype(run: Run) -> torch.dtype:
    """Return the dtype of the weights that are not quantized, before peft touches them."""
    if isinstance(run, Inference):
        return DTYPES.get(run.weights, torch.bfloat16)
    in_fp32 = run.precision.startswith("autocast") and not run.half_layers
    return torch.float32 if in_fp32 else compute_dtype(run)


def compute_dtype(run: Training) -> torch.dtype:
    """Return the dtype of the matrix products."""
    return DTYPES[run.compute_dtype]


def quantization_of(run: Run) -> str | None:
    """Return the dtype of the run's quantized weights, "nf4" or "int8"; None where they are not quantized."""
    asked = run.weights if isinstance(run, Inference) else run.quantization
    return asked if asked in QUANTIZED_BYTES else None


def build_model(
    spec: ModelSpec,
    run: Run,
    device: str | torch.device,
    recomputing: Around = nullcontext,
    shard: Callable[[nn.Module], None] | None = None,
    load_order: LoadOrder = one_at_a_time,
) -> nn.Module:
    """Return the transformers model of `spec` on `device`, random weights, in train mode (eval for Inference).

    `recomputing` makes the context in which a checkpointed block is recomputed: measure and simulate mark it with that.
    `shard` cuts the finished model up before it has memory. `load_order` is that of quantized weights.
    Raises NotAvailable for a library or a kernel this machine lacks, SpecError where LoRA's targets name no layer.
    """
    device = torch.device(device)
    _check_libraries(run, device)
    model: Any = on_meta(spec, run)
    if quantization := quantization_of(run):
        compute = weight_dtype(run) if isinstance(run, Inference) else compute_dtype(run)
        double = isinstance(run, Training) and run.double_quant
        model = quantize_linears(model, quantization, compute, device, load_order, double)
        vars(model.config).update(_is_quantized=True)  # as from_pretrained does: flash-attn gets config.dtype
    if shard is None:
        materialize(model, device)
    if isinstance(run, Inference):
        return model.eval()
    model = _prepare_for_training(model.train(), run, recomputing)
    if shard is not None:
        shard(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "DTensor random operators")  # which numbers are drawn does not matter
            materialize(model, device)
    if not run.compile:
        return model
    compiled = torch.compile(model)
    assert isinstance(compiled, nn.Module)  # an OptimizedModule, of which torch promises only that it can be called
    return compiled


def on_meta(spec: ModelSpec, run: Run) -> PreTrainedModel:
    """Return the model in the dtype and with the attention of `run`, on the meta device."""
    import transformers

    # No step reads the begin and end tokens, and in a smaller vocabulary than published transformers warns of them.
    unread = {"bos_token_id": None, "eos_token_id": None} if spec.has_formulas else {}
    try:
        config = transformers.AutoConfig.for_model(**{**spec.config, **unread})
    except Exception as error:  # a config class may raise anything for values that cannot be
        if "Unrecognized model identifier" in str(error):
            raise NotAvailable(f"transformers {transformers.__version__} has no model_type={spec.family!r}, which "
                               f"{release()} has; install that release") from None  # fmt: skip
        raise _refused(spec, error) from None
    config.use_cache = isinstance(run, Inference)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # published configs have one
    attention = IMPLEMENTATIONS[run.attention]
    auto = getattr(transformers, auto_class(spec.family) or "AutoModelForCausalLM")
    if isinstance(run, Training) and run.num_labels:
        auto = _classifier(spec, config, run.num_labels)
    with torch.device("meta"):
        try:
            model = auto.from_config(config, dtype=weight_dtype(run), attn_implementation=attention)
        except Exception as error:  # so may a model class
            if "attn_implementation" not in str(error):  # Gemma 2: its softcap is in no fused kernel
                raise _refused(spec, error) from None
            what = f"transformers' {spec.family} has no attention={run.attention!r}"
            raise NotAvailable(f"{what}; use attention='eager'") from None
    if auto is not transformers.AutoModelForSequenceClassification:
        model.loss_type = model.loss_type or "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def _classifier(spec: ModelSpec, config: Any, labels: int) -> Any:
    """Return the auto class of sequence classifiers, and give `config` what it needs."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise NotAvailable(f"num_labels={labels}: transformers has no sequence classifier of {spec.family}; leave out "
                           "num_labels, or give another model")  # fmt: skip
    config.num_labels = labels
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders find each sequence's last token by it
    return AutoModelForSequenceClassification


def _refused(spec: ModelSpec, error: Exception) -> SpecError:
    reason = " ".join(str(error).split())[:300]
    return SpecError(f"{spec.name}: transformers cannot build this config of {spec.family} ({reason}); give one that "
                     "AutoModel.from_config accepts")  # fmt: skip


def _prepare_for_training(model: Any, run: Training, recomputing: Around) -> Model:
    """Return the model as peft's preparation, checkpointing, Liger's kernels and adapters leave it. It prepares for
    adapters in fp32, and casts to it whatever is not quantized: with half ones, or `half_layers`, it stays half."""
    if run.checkpointing and run.lora:
        # Or no gradient would reach the adapters through frozen embeddings; newer transformers do it by themselves.
        model.enable_input_require_grads()
    half = run.half_layers == "all" or (run.lora is not None and not run.lora.autocast_adapter_dtype)
    if run.half_layers == "embeddings":
        _widen(model, (model.get_input_embeddings(), model.get_output_embeddings()))
    elif run.quantization and not half:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if run.checkpointing:
        _checkpoint_blocks(model, run.checkpointing, recomputing, run.compile)
    if run.kernels == "liger":
        check("liger_kernel")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    elif run.kernels == "fused-loss":
        model.loss_function = causal_loss
    elif run.kernels == "fused-norm":
        _fuse_norms(model)
    if run.objective.loss == "chunked":
        score_tokens(model, run)
    return _add_adapters(model, run.lora, run.num_labels) if run.lora else model


def _widen(model: nn.Module, tables: tuple[nn.Module, ...]) -> None:
    """Cast to fp32 the weights that are neither quantized nor those of `tables`."""
    for module in model.modules():
        for weight in () if module in tables else module.parameters(recurse=False):
            if weight.is_floating_point():
                weight.data = weight.data.float()


def _fuse_norms(model: nn.Module) -> None:
    """Let the model's RMSNorms, which transformers writes out in operators, be torch's one."""
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    if not norms:
        raise NotAvailable(f"kernels='fused-norm': {type(model).__name__} has no RMSNorm of Llama's kind; leave it out")
    for module in norms:
        module.forward = partial(_rms_norm, module)


def _rms_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden_states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _check_libraries(run: Run, device: torch.device) -> None:
    if run.attention == "efficient" and device.type != "cuda" and device.index is None:
        raise NotAvailable(
            f"attention='efficient' needs a CUDA GPU, and this is device={device.type!r}; give attention='sdpa'"
        )
    if isinstance(run, Training) and run.quantization == "gptq":
        raise NotAvailable("quantization='gptq' needs AutoGPTQ, which is no longer maintained and not installed here; "
                           "ask lab.estimate, or give quantization='nf4'")  # fmt: skip
    quantization = quantization_of(run)
    lora, kernels = (run.lora, run.kernels) if isinstance(run, Training) else (None, None)
    needs = [
        (lora, "peft", "lora", "llmlab[quant]"),
        (quantization, "bitsandbytes", f"{quantization} weights", "llmlab[quant]"),
        (kernels == "liger", "liger_kernel", "kernels='liger'", "llmlab[gpu]"),
        (kernels == "fused-loss", "flash_attn", "kernels='fused-loss'", "flash-attn"),
        (run.attention == "flash", "flash_attn", "attention='flash'", "flash-attn"),
    ]
    simulated = device.type != "cuda" and device.index is not None  # the GPU is "cpu:0"
    for needed, package, what, source in needs:
        if not needed or (simulated and package == "flash_attn"):  # simulate has functions of its own in its place
            continue
        for_gpus = package in ("liger_kernel", "flash_attn")
        if for_gpus and simulated:
            instead = "leave kernels out, or ask lab.estimate"
            raise NotAvailable(f"{what} cannot be simulated, because {package} is compiled for a GPU; {instead}")
        if for_gpus and device.type != "cuda":
            raise NotAvailable(f"{what} needs a CUDA GPU, and this is device={device.type!r}; leave it out")
        if find_spec(package) is None:
            raise NotAvailable(f"{what} needs {package}, which is not installed: pip install '{source}'")


@contextmanager
def pinned_attention(run: Run) -> Iterator[None]:
    """Let steps of attention="efficient" run in it: transformers repeats keys and values to all heads, where it would
    leave grouped ones to torch, and torch takes its memory-efficient kernel or none."""
    if run.attention != "efficient":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    check("transformers.integrations.sdpa_attention")
    from transformers.integrations import sdpa_attention

    repeats = mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *args: False)
    with repeats, sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        yield


@contextmanager
def confined_kernels(spec: ModelSpec, run: Run) -> Iterator[None]:
    """Let Liger's kernels be those of this run alone: for one model it replaces its family's functions and classes."""
    if not isinstance(run, Training) or run.kernels != "liger":
        yield
        return
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(**spec.config))]
    with mock.patch.dict(vars(import_module(model_class.__module__))):
        yield


def materialize(model: Model, device: torch.device) -> None:
    """Put what is on the meta device on `device`, with random values. As in from_pretrained, a weight that several
    modules share (a tied head, T5's embedding) takes memory once."""
    owners: dict[int, tuple[nn.Module, str]] = {}  # by identity of the parameter on the meta device
    for module in model.modules():
        own = dict(module._parameters)
        for name, parameter in own.items():
            if parameter is not None and id(parameter) in owners:
                del module._parameters[name]
        left = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in left):
            module.to_empty(device=device, recurse=False)
        shared = {name: owners[id(own[name])] for name in own if name not in module._parameters}
        owners |= {id(own[name]): (module, name) for name in module._parameters}
        made = {name: owner._parameters[theirs] for name, (owner, theirs) in shared.items()} | dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({name: made[name] for name in own})
    with _shards_initialized():
        model.initialize_weights()  # buffers too: rotary frequencies
    model.tie_weights()


@contextmanager
def _shards_initialized() -> Iterator[None]:
    """Let initializations that copy a tensor into a parameter, as those of state-space layers do, run where it is
    sharded: each rank copies its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    check("transformers.initialization")
    from transformers import initialization

    def copy(parameter: Tensor, source: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            source = distribute_tensor(source, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return original(parameter, source)

    original = initialization.copy_
    with mock.patch.object(initialization, "copy_", copy):
        yield


def _checkpoint_blocks(model: Model, kind: str, recomputing: Around, compiled: bool) -> None:
    """Recompute every block in backward (arXiv 1604.06174); "selective" keeps what `KEPT_OPERATORS` returned.

    In a compiled step that is part of the graph, and takes no context but selective checkpointing's.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    operators = [getattr(aten, name).default for name in KEPT_OPERATORS if hasattr(aten, name)]
    if hasattr(torch.ops.flash_attn, "_flash_attn_forward"):  # flash-attn's, where it is imported
        operators.append(torch.ops.flash_attn._flash_attn_forward.default)

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        if kind == "full":
            return nullcontext(), recomputing()
        saving, replaying = create_selective_checkpoint_contexts(operators)
        if compiled:
            return saving, replaying
        return saving, _both(replaying, recomputing())

    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    marked = {} if compiled and kind == "full" else {"context_fn": contexts}
    enable({"use_reentrant": False, **marked})


@contextmanager
def _both(outer: AbstractContextManager, inner: AbstractContextManager) -> Iterator[None]:
    with outer, inner:
        yield


def _add_adapters(model: PreTrainedModel, lora: LoRA, num_labels: int | None) -> PeftModel | PeftMixedModel:
    """Return the peft model: adapters on `lora.targets`, in fp32 where frozen weights are half, if not told not to."""
    from peft import LoraConfig, get_peft_model

    Conv1D = symbol("transformers.pytorch_utils.Conv1D")
    names = {name.rsplit(".", 1)[-1]: module for name, module in model.named_modules()}
    linears = sorted(name for name, module in names.items() if isinstance(module, (nn.Linear, Conv1D)))
    targets = lora.targets
    if targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        targets = tuple(name for name in linears if names[name] is not head)
    if unknown := [target for target in targets if target not in linears]:
        raise SpecError(f"LoRA targets {', '.join(unknown)} are not linear layers of the model; it has "
                        f"{', '.join(linears)}")  # fmt: skip
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=list(targets),
        fan_in_fan_out=any(isinstance(names[target], Conv1D) for target in targets),
        bias="none",
        task_type="SEQ_CLS" if num_labels else "CAUSAL_LM",  # the new head of a classifier is trained whole
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is going away
        return get_peft_model(model, config, autocast_adapter_dtype=lora.autocast_adapter_dtype)
