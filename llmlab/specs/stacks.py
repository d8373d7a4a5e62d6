"""Whose code trains: a stack's own options, by its own names, and what it sets where a run says nothing.

>>> from llmlab.specs.run import Training
>>> Training(dp=8, stack="torchtitan:ac=full")
Training(precision='mixed-bf16', checkpointing='full', zero=3, dp=8, stack=Torchtitan(ac='full'))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from ..base.errors import SpecError, unknown_name
from .fields import Spec

TRANSFORMERS = "transformers"
TitanAC = Literal["none", "full", "selective_op", "selective_layers"]
Reshard = Literal["default", "always", "never"]
TitanOptimizer = Literal["fused", "foreach"]
Recompute = Literal["selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
RECOMPUTED = {"core_attn", "mlp"}  # modules of Megatron's --recompute-modules that are described


class StackOptions(Spec):
    """A stack's options. `name` is the stack's; `allowed` the values of Training's fields that it has, where not all.

    Raises SpecError for an option that this stack has not, and names the stack that has it.
    """

    name: ClassVar[str]
    package: ClassVar[str]  # what simulating it imports
    expandable_segments: ClassVar[bool] = False  # whether its launcher sets them for the allocator
    own_head: ClassVar[bool] = False  # whether its final norm and head are a unit of FSDP2, and its embedding another
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]]
    families: ClassVar[tuple[str, ...]]  # of models that are described; of ModelSpec.family

    def __new__(cls, *args: Any, **options: Any) -> StackOptions:
        for option in options:
            if option not in (own := [f.name for f in fields(cls)]):
                others = [one.name for one in STACKS.values() if option in {f.name for f in fields(one)}]
                whose = f"it is {' and '.join(others)}'s" if others else "no stack has it"
                raise SpecError(f"{cls.name} has no option {option}: {whose}; {cls.name} has {', '.join(own)}")
        return super().__new__(cls)

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return False

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 leaves a head of `own_head` gathered from forward to backward."""
        return False

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the stack sets fields of Training to that are left at their default; `given` are all fields."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the stack's name and the options as JSON-ready values."""
        return {"name": self.name, **super().to_dict()}


@dataclass(frozen=True, repr=False)
class Torchtitan(StackOptions):
    """torchtitan's options that change memory, by the names in its torchtitan/config/job_config.py.

    `ac` is what backward recomputes: None follows the run's `checkpointing`, and where that is None too is what
    torchtitan's Llama configurations have, "selective_op": all but attention and every second matrix product.
    "selective_layers" recomputes one of `every` blocks in full. `keeps_attention=False` is "selective_op" up to release
    0.2.0, whose list of what is kept lacks cuDNN's attention, which an H100 takes. `reshard_after_forward` is FSDP2's
    policy: "default" keeps the final norm and the head gathered until backward, "never" keeps everything. `optimizer`
    is the implementation of AdamW.
    """

    name = "torchtitan"
    package = "torchtitan"
    families = ("llama", "qwen3")
    expandable_segments = True  # run_train.sh
    own_head = True  # models/llama3/infra/parallelize.py, apply_fsdp
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "autocast-bf16", "fp32"),
        "optimizer": ("adamw",),
        "attention": ("sdpa",),
        "lora": (None,),
        "quantization": (None,),
        "offload": (None,),
        "kernels": (None,),
        "schedule": ("1f1b",),
        "virtual_stages": (1,),
    }

    ac: TitanAC | None = None
    every: int = 2
    keeps_attention: bool = True
    reshard_after_forward: Reshard = "default"
    optimizer: TitanOptimizer = "fused"

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return self.optimizer == "fused"

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 leaves the head gathered from forward to backward."""
        return self.reshard_after_forward != "always"

    def __post_init__(self) -> None:
        self._check_counts("every")
        self._check_choices(
            ac=(None, *get_args(TitanAC)),
            keeps_attention=(True, False),
            reshard_after_forward=get_args(Reshard),
            optimizer=get_args(TitanOptimizer),
        )

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 by FSDP2's policy; by autocast on one device, where nothing is sharded (distributed/utils.py,
        maybe_enable_amp), and not at all with tensor parallelism alone."""
        sharded = given["dp"] > 1
        modes = {None: "selective", "none": None, "full": "full"}
        return {
            "precision": "mixed-bf16" if sharded else "autocast-bf16" if given["tp"] == 1 else "fp32",
            "checkpointing": modes.get(self.ac, "selective"),
            "zero": (2 if self.reshard_after_forward == "never" else 3) if sharded else 0,
            "sequence_parallel": given["tp"] > 1,
        }


@dataclass(frozen=True, repr=False)
class Megatron(StackOptions):
    """Megatron-LM's options that change memory, by the names of its arguments (megatron/training/arguments.py).

    `recompute` is --recompute-granularity, None the run's `checkpointing`. "selective" computes `recompute_modules`
    again, of "core_attn" and "mlp". "full" keeps the input of every `recompute_num_layers` layers ("uniform"), or
    the inputs of so many layers of each virtual stage, and the others whole ("block").

    `transformer_engine`: layers of Transformer Engine, or Megatron's own with Apex (--transformer-impl local).
    `masked_softmax_fusion`: softmax of unfused attention (attention="eager") as one kernel in half precision; without
    Apex, Megatron's own layers take PyTorch's, in fp32. `accumulate_allreduce_grads_in_fp32`: None is Megatron's
    default, True for bf16. `virtual_pipeline` is the model chunks of a rank (--num-virtual-stages-per-pipeline-rank),
    `make_vocab_size_divisible_by` pads the vocabulary of each tensor-parallel rank. The distributed optimizer is the
    run's zero=1, sequence parallelism its sequence_parallel, --attention-backend unfused its attention="eager".
    """

    name = "megatron"
    package = "megatron"
    families = ("gpt2", "llama", "mistral", "qwen2", "phi3")
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "mixed-fp16"),
        "optimizer": ("adamw",),
        "attention": ("sdpa", "flash", "eager"),
        "zero": (0, 1),
        "ep": (1,),
        "lora": (None,),
        "quantization": (None,),
        "offload": (None,),
        "compile": (False,),
        "kernels": (None,),
        "schedule": ("1f1b",),
    }

    recompute: Recompute | None = None
    recompute_method: RecomputeMethod | None = None
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    transformer_engine: bool = True
    masked_softmax_fusion: bool = True
    accumulate_allreduce_grads_in_fp32: bool | None = None
    virtual_pipeline: int = 1
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        self._check_counts("recompute_num_layers", "virtual_pipeline", "make_vocab_size_divisible_by")
        self._check_choices(
            recompute=(None, *get_args(Recompute)),
            recompute_method=(None, *get_args(RecomputeMethod)),
            transformer_engine=(True, False),
            masked_softmax_fusion=(True, False),
            accumulate_allreduce_grads_in_fp32=(None, True, False),
        )
        modules = self.recompute_modules
        modules = tuple(modules.split() if isinstance(modules, str) else modules)
        if not modules or not set(modules) <= RECOMPUTED:
            raise SpecError(f"recompute_modules={modules!r} is not of {', '.join(sorted(RECOMPUTED))}, one or both")
        object.__setattr__(self, "recompute_modules", modules)
        if self.recompute == "selective" and self.recompute_method:
            raise SpecError(f"recompute_method={self.recompute_method!r} is for recompute='full', not 'selective'")

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Half weights and products with fp32 main weights; nothing is recomputed or sharded unless somebody asks."""
        return {
            "precision": "mixed-bf16",
            "checkpointing": self.recompute or given["checkpointing"],
            "virtual_stages": self.virtual_pipeline,
        }

    def accumulates_in_fp32(self, dtype: str) -> bool:
        """Whether gradients of a run in `dtype` are summed in fp32."""
        asked = self.accumulate_allreduce_grads_in_fp32
        return dtype == "bf16" if asked is None else asked

    def check_stages(self, stages: tuple[int, ...]) -> None:
        """Raise SpecError where stages of these numbers of layers cannot be cut into the virtual ones."""
        chunks = self.virtual_pipeline
        given = f"virtual_pipeline={chunks}"
        if any(layers % chunks for layers in stages):
            raise SpecError(f"{given} does not divide the layers of each stage, {', '.join(map(str, stages))}")


STACKS: dict[str, type[StackOptions]] = {stack.name: stack for stack in (Torchtitan, Megatron)}


def resolved(stack: Any) -> StackOptions | str:
    """Return the options that `stack` names ("torchtitan", "torchtitan:ac=full,every=2"); options stay as they are."""
    if isinstance(stack, StackOptions) or stack == TRANSFORMERS:
        return stack
    names = [TRANSFORMERS, *STACKS]
    if not isinstance(stack, str):
        raise SpecError(f"stack={stack!r} is a {type(stack).__name__}; give {', '.join(names)}, or one's options")
    name, _, options = stack.partition(":")
    if name not in STACKS:
        raise unknown_name("stack", name, names, f"It is one of {', '.join(names)}.")
    return STACKS[name](**_options(stack, options.split(",") if options else ()))


def _options(stack: str, texts: Iterable[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        option, equals, value = text.strip().partition("=")
        if not equals:
            raise SpecError(f"stack={stack!r}: {text!r} is not an option and its value; for example torchtitan:ac=full")
        words: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False}
        values[option] = int(value) if value.isdigit() else words.get(value, value)
    return values


def stack_from_dict(data: Mapping[str, Any]) -> StackOptions:
    """Return the options that `StackOptions.to_dict` gave."""
    name = data.get("name")
    if name not in STACKS:
        raise SpecError(f"stack {name!r} is not one of {', '.join(STACKS)}")
    return STACKS[name](**{option: value for option, value in data.items() if option != "name"})


def check_stack(stack: StackOptions | str, given: Mapping[str, Any]) -> None:
    """Raise SpecError where the run's fields `given` ask for what `stack` has not, and name the stacks that have it."""
    if not isinstance(stack, StackOptions):
        return
    for field, values in stack.allowed.items():
        if given[field] not in values:
            others = [TRANSFORMERS]
            others += [s.name for s in STACKS.values() if given[field] in s.allowed.get(field, (given[field],))]
            own = ", ".join("none" if value is None else repr(value) for value in values)
            raise SpecError(
                f"{stack.name} has no {field}={given[field]!r}: stack={' or '.join(map(repr, others))} has; "
                f"with stack={stack.name!r} give {field}={own}"
            )
    for field, value in stack.sets(given).items():
        if field in ("checkpointing", "zero", "virtual_stages") and value != given[field]:
            _check_agrees(stack, field, given[field], value)


def _check_agrees(stack: StackOptions, field: str, given: Any, value: Any) -> None:
    """Refuse a field that says one thing where the stack's own option says another."""
    if isinstance(stack, Megatron):
        option = "recompute" if field == "checkpointing" else "virtual_pipeline"
        said = f"Megatron({option}={getattr(stack, option)!r})"
        raise SpecError(f"{field}={given!r} with stack={said}; give one of them, or both alike")
    if isinstance(stack, Torchtitan):
        if field == "checkpointing" and stack.ac is None:
            return  # the run says it, and the stack nothing
        option = "ac" if field == "checkpointing" else "reshard_after_forward"
        said = getattr(stack, option)
        raise SpecError(
            f"{field}={given!r} with stack=Torchtitan({option}={said!r}), which is {field}={value!r}; give one of them"
        )
