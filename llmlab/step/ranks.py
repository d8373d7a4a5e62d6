"""A rank's share of a training step on several devices, cut up by PyTorch's own engines.

    zero=0   DistributedDataParallel, with its defaults
    zero=1   the same, and ZeroRedundancyOptimizer
    zero=2   fully_shard (FSDP2) with reshard_after_forward=False: gathered parameters stay from forward to backward
    zero=3   fully_shard
    dp_replicate   fully_shard over a mesh of two dimensions: HSDP, which sums a shard's gradients over its copies
    tp       parallelize_module: linears by columns and rows, embedding, logits and loss by vocabulary; with
             loss_parallel=False each rank gathers the logits

FSDP2's units are the blocks, and what is outside of them: what Accelerate's TRANSFORMER_BASED_WRAP makes. Under it
"mixed-*" is its MixedPrecisionPolicy: fp32 shards, half precision gathered, gradients reduced in fp32. With several
micro-batches DDP sends gradients after the last (no_sync), FSDP2 after each unless sync_each_batch=False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..base.compat import check
from ..base.errors import NotAvailable, SpecError
from ..course.techniques.tensor_parallel import COLUMNS, ROWS
from ..ranks.fsdp import shard_units
from ..specs.model import ModelSpec
from ..specs.run import Run, Training, stack_of
from .optimizer import ELEMENTWISE, TORCH_OPTIMIZERS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

SPLIT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose linears have these names


@dataclass(frozen=True)
class Ranks:
    """The devices of a run, as a mesh with the axes "dp" and "tp"; this process is one of them. With dp_replicate, "dp"
    is two axes, "dp_replicate" and "dp_shard".

    `fake`: there are no others, and operators that follow from shapes alone may be skipped.
    """

    mesh: DeviceMesh
    fake: bool = False


def join(run: Training, fake: bool = False) -> Ranks:
    """Return the ranks of `run`, whose process group is there already; neighbours are tensor-parallel."""
    from torch.distributed.device_mesh import init_device_mesh

    if run.dp_replicate > 1:
        degrees = {"dp_replicate": run.dp_replicate, "dp_shard": run.dp_shard, "tp": run.tp}
    else:
        degrees = {"dp": run.dp, "tp": run.tp}
    return Ranks(init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees)), fake)


def check_one_device(run: Run) -> None:
    """Raise NotAvailable where `run` asks for what a single device cannot do; ZeRO with dp=1 cuts nothing."""
    degrees = {name: getattr(run, name, 1) for name in ("dp", "tp", "pp", "cp", "ep")}
    asked = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if asked:
        asked += [f"zero={stage}"] if (stage := getattr(run, "zero", 0)) else []
        raise NotAvailable(f"measure uses one device, and {', '.join(asked)} needs several; ask lab.estimate")


def check_ranks(spec: ModelSpec, run: Run, verb: str) -> None:
    """Raise NotAvailable for what these engines do not do, SpecError for what does not divide; `verb` is who asks."""
    see = f"{verb} does not support"
    if not isinstance(run, Training):
        raise NotAvailable(f"{see} tp={run.tp} for generation; ask lab.estimate")
    for axis in ("pp", "cp", "ep"):
        if getattr(run, axis) > 1:
            raise NotAvailable(f"{see} {axis}={getattr(run, axis)}, only dp, zero and tp; ask lab.estimate")
    if run.offload:
        raise NotAvailable(f"{see} offload={run.offload!r} on several devices; ask lab.estimate")
    if run.compile:
        raise NotAvailable(f"{see} compile=True on several devices; give compile=False, or ask lab.estimate")
    if run.quantization and (run.zero or run.tp > 1):
        raise NotAvailable(f"{see} quantization={run.quantization!r} with zero={run.zero}, tp={run.tp}; give zero=0")
    if run.zero and run.optimizer not in TORCH_OPTIMIZERS:
        choice = f"optimizer={run.optimizer!r} with zero={run.zero}"
        raise NotAvailable(f"{see} {choice}: optimizers of bitsandbytes cannot step shards; give "
                           f"{', '.join(TORCH_OPTIMIZERS)}")  # fmt: skip
    if run.zero == 1 and run.dp_replicate > 1:
        choice = f"dp_replicate={run.dp_replicate} with zero=1"
        raise NotAvailable(f"{see} {choice}: only FSDP2 replicates shards (HSDP); give zero=2 or 3, or ask "
                           "lab.estimate")  # fmt: skip
    if run.zero == 1 and run.precision.startswith("mixed"):
        choice = f"precision={run.precision!r} with zero=1"
        raise NotAvailable(f"{see} {choice}: PyTorch has no sharded fp32 master copy; give zero=2 or 3, or ask "
                           "lab.estimate")  # fmt: skip
    if run.zero >= 2 and run.optimizer == "adafactor":  # its torch.pow_ has no rule for shards
        choice = f"optimizer='adafactor' with zero={run.zero}"
        raise NotAvailable(f"{see} {choice}: torch's Adafactor cannot step shards; give adamw or sgd, or ask "
                           "lab.estimate")  # fmt: skip
    if run.tp > 1 and run.dp > 1 and run.zero < 2:
        choice = f"dp={run.dp}, tp={run.tp} with zero={run.zero}"
        raise NotAvailable(f"{see} {choice}: DDP does not support DTensors; give zero=2 or 3, or ask lab.estimate")
    if run.tp > 1:
        _check_tensor_parallel(spec, run, see)


def _check_tensor_parallel(spec: ModelSpec, run: Training, see: str) -> None:
    if spec.family not in SPLIT_FAMILIES:
        raise NotAvailable(f"{see} tp={run.tp} for {spec.family}, only for {', '.join(SPLIT_FAMILIES)}")
    if run.lora or run.optimizer not in ELEMENTWISE:
        raise NotAvailable(f"{see} tp={run.tp} with LoRA or optimizer={run.optimizer!r}; ask lab.estimate")
    sizes = {"key-value heads": spec.kv_heads, "vocabulary": spec.vocab, "intermediate size": spec.intermediate}
    if run.sequence_parallel:
        sizes["tokens of seq_len"] = run.seq_len
    for what, size in sizes.items():
        if size % run.tp:
            raise SpecError(f"tp={run.tp} does not divide {spec.name}'s {size} {what}")


def is_sharded(run: Run) -> bool:
    """Whether FSDP2 shards the parameters of `run`."""
    return isinstance(run, Training) and run.zero >= 2 and run.dp > 1


def as_built(run: Training) -> Training:
    """Return the run whose model FSDP2 is given: its policy makes half precision of fp32 shards."""
    mixed = is_sharded(run) and run.precision.startswith("mixed")
    return replace(run, precision="fp32", reduce_dtype="fp32") if mixed else run


def shard(model: PreTrainedModel, run: Training, ranks: Ranks) -> None:
    """Cut `model`, which is on the meta device, up for tp and for zero=2 and 3."""
    if run.tp > 1:
        _split(model, run, ranks)
        model.tie_weights()
    if not is_sharded(run):
        return
    from ..engines.configs import fsdp_arguments

    alone = replace(run, tp=1, sequence_parallel=False, loss_parallel=True)
    if not run.precision.startswith("mixed"):
        alone = replace(alone, precision="fp32", reduce_dtype="fp32")
    arguments = fsdp_arguments(alone)
    mesh = ranks.mesh["dp_replicate", "dp_shard"] if run.dp_replicate > 1 else ranks.mesh["dp"]
    shard_units(model, blocks(model), mesh=mesh, **arguments)


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the model's blocks: the modules of the class that transformers says may not be split. One that shares a
    parameter with the rest of the model, such as BERT's embeddings with its head, can't be a unit of FSDP2."""
    check("transformers.modeling_utils")
    names = set(model._no_split_modules or ())
    holders = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    return [
        module for module in model.modules()
        if type(module).__name__ in names and all(holders[id(own)] == 1 for own in module.parameters())
    ]  # fmt: skip


def data_parallel(model: nn.Module, run: Training, ranks: Ranks, unused: bool = False) -> nn.Module:
    """Return `model` in DDP, where its ranks hold the same parameters. DDP must be told if a step leaves some `unused`,
    such as a vision tower without images: it waits for the gradient of each."""
    if run.dp == 1 or is_sharded(run):
        return model
    group = ranks.mesh["dp"].get_group()
    return nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)


@contextmanager
def unsynced(model: nn.Module, run: Training) -> Iterator[None]:
    """The context of a micro-batch after which gradients are not yet sent, as Accelerator.no_sync makes it."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
        return
    if run.sync_each_batch:
        yield
        return
    whole: Any = model  # an FSDPModule
    whole.set_requires_gradient_sync(False)
    yield
    whole.set_requires_gradient_sync(True)


def steps_locally(run: Training, ranks: Ranks) -> bool:
    """Whether the optimizer is given `LocalShards`: for tp, whose parameters lie on several meshes, or to save time."""
    return run.optimizer in ELEMENTWISE and (run.tp > 1 or (ranks.fake and is_sharded(run)))


class LocalShards:
    """The local tensors of DTensors, for an optimizer to step in the place of those.

    SGD and AdamW change each element by itself, so the operators on this rank are the same; DTensor's own dispatch, and
    its rule that tensors of a list lie on one mesh, are left out.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.pairs = [(whole, nn.Parameter(local(whole.detach()))) for whole in parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The local tensors."""
        return [part for _, part in self.pairs]

    def take_gradients(self) -> None:
        """Move each gradient to the local tensor, cut as its parameter is."""
        from torch.distributed.tensor import DTensor

        for whole, part in self.pairs:
            mine = local(whole.detach())
            if mine.untyped_storage()._cdata != part.untyped_storage()._cdata:
                part.data = mine  # FSDP2 pads uneven shards when it starts
            if whole.grad is not None:
                gradient, whole.grad = whole.grad, None
                if isinstance(whole, DTensor) and isinstance(gradient, DTensor):  # the same placements: no change
                    gradient = gradient.redistribute(placements=whole.placements)
                part.grad = local(gradient)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def around_steps(run: Run) -> AbstractContextManager:
    """Return the context in which steps run: with tp, the loss of logits that are cut by vocabulary. Another stack has
    its own."""
    if getattr(run, "tp", 1) == 1 or stack_of(run).own_program:
        return nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _split(model: nn.Module, run: Training, ranks: Ranks) -> None:
    """Cut the linears as Megatron-LM does (arXiv 1909.08053), with sequence_parallel all between them by tokens too
    (arXiv 2205.05198)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    cut = run.sequence_parallel
    between = Shard(1) if cut else Replicate()
    plan: dict[str, ParallelStyle] = {}
    for name, _ in model.named_modules():
        last = name.rpartition(".")[2]
        if last == "embed_tokens":
            plan[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=not cut)
        elif last == "lm_head":
            layout, whole = (Shard(-1), False) if run.loss_parallel else (Replicate(), True)
            plan[name] = ColwiseParallel(input_layouts=between, output_layouts=layout, use_local_output=whole)
        elif last in COLUMNS:
            plan[name] = ColwiseParallel()
        elif last in ROWS:
            plan[name] = RowwiseParallel(output_layouts=between, use_local_output=not cut)
        elif cut and last == "self_attn":
            plan[name] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": between},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
                use_local_output=True,
            )
        elif cut and last == "mlp":
            plan[name] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),), use_local_output=True
            )
        elif cut and last.endswith("norm") and last not in ("q_norm", "k_norm"):
            plan[name] = SequenceParallel()
    parallelize_module(model, ranks.mesh["tp"], plan)
