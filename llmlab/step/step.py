"""The step itself: what a user's training script or generation runs, in phases.

`measure` runs it on the machine's device, `simulate` on fake tensors; there is one step, so the two can be compared.
`enter(phase, **alive)` is called as each phase begins, with the tensors that only the step knows of.

    T  seq_len (prompt_len in generation)     B  micro_batch (batch in generation)     V  vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import NotAvailable
from ..course.techniques.offload import Offloaded
from ..course.techniques.precision import MasterWeights
from ..data import batch
from ..specs.images import Images, images_of
from ..specs.model import ModelSpec
from ..specs.run import Inference, Run, Training
from .batch import arguments, with_images
from .methods import loss_of, other_models
from .model import DTYPES, Around, build_model, compute_dtype, weight_dtype
from .optimizer import (
    LEARNING_RATE,
    TORCH_OPTIMIZERS,
    build_muon,
    build_optimizer,
    in_blocks,
)
from .quantized import LoadOrder, one_at_a_time
from .ranks import (
    LocalShards,
    Ranks,
    as_built,
    check_one_device,
    data_parallel,
    is_sharded,
    local,
    shard,
    steps_locally,
    unsynced,
)

Enter = Callable[..., None]
NARROW = ("fp8", "int8", "int4")  # of a KV cache beside wider weights


def ignore(phase: str, **alive: Any) -> None:
    """Do nothing as a phase begins."""


@dataclass
class Step:
    """A model and what one step of its run needs; calling it runs the step. `inputs`: token ids, (B, T) each."""

    run: Run
    device: torch.device
    model: nn.Module
    inputs: list[Tensor]
    optimizer: Optimizer | None = None
    masters: MasterWeights | None = None
    shards: LocalShards | None = None
    parameters: list[nn.Parameter] | None = None  # what lasts, where FSDP2 puts gathered ones in the model for a while
    scaler: torch.amp.GradScaler | None = None
    cache: Any = field(default=None, repr=False)
    offload: Offloaded | None = None
    method_models: dict[str, nn.Module] = field(default_factory=dict)  # models of the method, by what they are for
    images: Images | None = None  # of each sequence
    decoder: Callable[..., Any] | None = None  # called in the model's place to generate: `simulate` plays steps back

    def __call__(self, enter: Enter = ignore) -> None:
        if isinstance(self.run, Training):
            training_step(self, enter)
        else:
            generate(self, enter)

    def tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live across phases, by part; "buffers" are the model's, "inputs" the token ids."""
        parameters = self.parameters or list(self.model.parameters())
        parameters = parameters + [p for model in self.method_models.values() for p in model.parameters()]
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]] if self.optimizer else []
        parts = {
            "weights": parameters + _quantization_tensors(self.model),
            "buffers": list(self.model.buffers()),
            "gradients": [p.grad for p in [*parameters, *stepped] if p.grad is not None],
            "optimizer": [master for _, master in self.masters.pairs] if self.masters else [],
            "kv_cache": list(_tensors_in(self.cache)),
            "inputs": self.inputs,
        }
        if self.optimizer:
            inner = getattr(self.optimizer, "optim", self.optimizer)  # ZeroRedundancyOptimizer's own one
            states = [value for state in inner.state.values() for value in state.values()]
            parts["optimizer"] += [value for value in states if isinstance(value, Tensor)]
        return {part: [local(tensor) for tensor in tensors] for part, tensors in parts.items()}


def _tensors_in(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors of a KV cache, transformers' or ours, wherever it keeps them."""
    if isinstance(cache, Tensor):
        yield cache
    elif isinstance(cache, (list, tuple)):
        for one in cache:
            yield from _tensors_in(one)
    elif cache is not None and hasattr(cache, "__dict__"):
        yield from _tensors_in(list(vars(cache).values()))


def _quantization_tensors(model: nn.Module) -> list[Tensor]:
    """Return bitsandbytes' scales and code books: weights' bytes that are neither parameters nor buffers."""
    owners: list[Any] = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        states = [getattr(weight, "quant_state", None), getattr(module, "state", None)]
        owners += [weight, *states, *(getattr(state, "state2", None) for state in states)]
    values = (getattr(owner, name, None) for owner in owners for name in ("absmax", "code", "offset", "SCB", "CB"))
    return [value for value in values if isinstance(value, Tensor)]


def texts(spec: ModelSpec, run: Run) -> list[Tensor]:
    """Return the real text of one step as token ids on the CPU: a (B, T) tensor per micro-batch, or the prompts'."""
    if isinstance(run, Inference):
        return [batch(spec.vocab, run.batch, run.prompt_len)]
    batches = [batch(spec.vocab, run.sequences, run.seq_len, seed=i) for i in range(run.accumulation)]
    return [with_images(ids, images_of(spec, run)) for ids in batches]


def build_step(
    spec: ModelSpec,
    run: Run,
    device: str | torch.device,
    inputs: list[Tensor],
    recomputing: Around = nullcontext,
    ranks: Ranks | None = None,
    load_order: LoadOrder = one_at_a_time,
) -> Step:
    """Return the step of `run` on `device`: random weights, and copies of `inputs`, which `texts` gives.

    `recomputing` makes the context in which a checkpointed block is recomputed. With `ranks` the step is that of one of
    them. `load_order` is that of quantized weights. Raises NotAvailable for what one device, or this machine's
    libraries, cannot do.
    """
    if ranks is None:
        check_one_device(run)
    device = torch.device(device)
    if isinstance(run, Training) and run.fp8:
        raise NotAvailable(f"fp8={run.fp8!r} is neither simulated nor measured; ask lab.estimate, or run your own "
                           "script with torchao under llmlab run")  # fmt: skip
    if isinstance(run, Inference):
        _check_cache(spec, run)
        model = build_model(spec, run, device, load_order=load_order)
        return Step(run, device, model, [ids.to(device, copy=True) for ids in inputs])
    cut = partial(shard, run=run, ranks=ranks) if ranks and (is_sharded(run) or run.tp > 1) else None
    build = partial(build_model, device=device, recomputing=recomputing, shard=cut, load_order=load_order)
    model = build(spec, as_built(run))
    step = Step(run, device, model, [], parameters=list(model.parameters()) if ranks else None)
    if run.method != "sft":
        step.method_models = other_models(spec, as_built(run), build)
    step.images = images_of(spec, run)
    if not run.offload:
        _add_optimizer(step, run, ranks)
    step.inputs = [ids.to(device, copy=True) for ids in inputs]
    if run.offload:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        step.offload = Offloaded(trained, TORCH_OPTIMIZERS[run.optimizer], lr=LEARNING_RATE)
    return step


def _check_cache(spec: ModelSpec, run: Inference) -> None:
    """Raise NotAvailable for a KV cache that transformers would hold in another dtype, or not at all."""
    if run.kv in NARROW and spec.window_layers:
        raise NotAvailable(f"kv={run.kv!r} with a sliding window: transformers has no such cache; see lab.estimate")
    if run.kv not in NARROW and DTYPES[run.kv] != weight_dtype(run):
        dtype_name = next(name for name, dtype in DTYPES.items() if dtype == weight_dtype(run))
        raise NotAvailable(
            f"kv={run.kv!r} with weights={run.weights!r}: transformers stores the cache in {dtype_name}; "
            f"give kv={dtype_name!r}"
        )


def _add_optimizer(step: Step, run: Training, ranks: Ranks | None) -> None:
    """Give the step its optimizer, with master weights and a loss scaler where the run has them; wrap it for DDP."""
    models = step.model, *step.method_models.values()
    stepped = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    if ranks and steps_locally(run, ranks):
        step.shards = LocalShards(stepped)
        stepped = step.shards.parameters
    if run.precision.startswith("mixed") and not is_sharded(run):
        step.masters = MasterWeights(stepped)
        stepped = step.masters.parameters
    if ranks and run.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group, kind = ranks.mesh["dp"].get_group(), TORCH_OPTIMIZERS[run.optimizer]
        step.optimizer = ZeroRedundancyOptimizer(stepped, kind, process_group=group, lr=LEARNING_RATE)
    elif run.optimizer == "muon":
        step.optimizer = build_muon(stepped, in_blocks(step.model), True if step.masters else None)
    else:
        # Master copies are stepped by a fused kernel, as in DeepSpeed and Megatron-LM.
        name = "adamw-fused" if step.masters and run.optimizer == "adamw" else run.optimizer
        step.optimizer = build_optimizer(name, stepped)
    if ranks:
        text_alone = getattr(step.model.config, "vision_config", None) and not step.images
        step.model = data_parallel(step.model, run, ranks, unused=bool(text_alone))
    if run.precision in ("autocast-fp16", "mixed-fp16"):
        step.scaler = torch.amp.GradScaler(step.device.type)


def training_step(step: Step, enter: Enter = ignore) -> None:
    """Run one optimizer step: forward and backward one micro-batch at a time, then the update.

    `output`, and with it the logits, lives on through backward and the update, as it does in a training loop that
    names it.
    """
    run, optimizer = step.run, step.optimizer
    assert isinstance(run, Training)
    cast = torch.autocast(step.device.type, compute_dtype(run), enabled=run.precision.startswith("autocast"))
    output: Any = None
    logits: Any = None
    for i, ids in enumerate(step.inputs, 1):  # (B, T)
        enter("forward")
        output = logits = None  # the last micro-batch's logits go before this one's forward
        with unsynced(step.model, run) if i < run.accumulation else nullcontext():
            with cast:
                if run.method == "sft":
                    output = step.model(**arguments(step.model, ids, run, step.images))
                    loss, logits = output.loss, output.logits  # (B, T, V); None with a fused loss
                else:
                    loss, logits = loss_of(run, {"trained": step.model, **step.method_models}, ids)
            loss = loss / run.accumulation
            if step.scaler:
                loss = step.scaler.scale(loss)
            enter("backward", logits=local(logits))
            if run.method != "sft":
                logits = None  # TRL's trainers return the loss alone
            loss.backward()
    enter("optimizer")
    if step.offload:
        step.offload.step()
        enter("optimizer")
        return
    assert optimizer is not None  # or the step is offloaded
    if step.shards:
        step.shards.take_gradients()
    if step.masters:
        step.masters.copy_gradients()
    if step.scaler:
        step.scaler.step(optimizer)
        step.scaler.update()
    else:
        optimizer.step()
    if step.masters:
        step.masters.copy_weights()
    enter("optimizer")
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def generate(step: Step, enter: Enter = ignore) -> Tensor:
    """Return `new_tokens` greedy tokens after each prompt, (B, new_tokens); the last goes through no model."""
    assert isinstance(step.run, Inference)
    enter("prefill")
    model, step.cache = step.decoder or step.model, _new_cache(step, step.run.kv)
    tokens = step.inputs[0]  # (B, T)
    logits: Tensor | None = None
    new = []
    for i in range(step.run.new_tokens):
        if i:
            enter("decode", logits=logits)  # of the token before
        output = model(input_ids=tokens, past_key_values=step.cache, use_cache=True, logits_to_keep=1)
        logits = output.logits
        tokens = output.logits[:, -1:].argmax(-1)  # (B, 1)
        new.append(tokens)
    enter("decode" if step.run.new_tokens > 1 else "prefill", logits=logits)
    step.cache = None
    return torch.cat(new, dim=1)


def _new_cache(step: Step, kv: str) -> Any:
    """Return an empty KV cache in the dtype `kv`: transformers' own, but for int8 and int4.

    Those backends of transformers need a library more, and round all anew every 128 tokens.
    """
    from transformers import DynamicCache, QuantizedCache

    config: Any = step.model.config  # of transformers' model, whose class AutoModel chose
    if kv == "fp8":
        return QuantizedCache("fp8", config)
    if kv in NARROW:
        from ..course.inference.quantized_cache import QuantizedCache as Rounded
        from ..course.inference.transformers_cache import AsTransformers

        return AsTransformers(Rounded(int(kv.removeprefix("int"))))
    return DynamicCache(config=config)
