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
TuneOptimizer = Literal["AdamW", "AdamW8bit", "PagedAdamW8bit"]
SHARDED_ALONE = {"tok_embeddings", "output"}  # of torchtune's model, beside blocks
RECOMPUTED = {"core_attn", "mlp"}  # modules of Megatron's --recompute-modules that are described


class StackOptions(Spec):
    """A stack's options. `name` is the stack's; `allowed` the values of Training's fields that it has, where not all.

    Raises SpecError for an option that this stack has not, and names the stack that has it.
    """

    name: ClassVar[str]
    package: ClassVar[str]  # what simulating it imports
    expandable_segments: ClassVar[bool] = False  # whether its launcher sets them for the allocator
    ties_heads: ClassVar[bool] = False  # whether models whose head is the embedding are described
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]]
    own_names: ClassVar[Mapping[str, str]]  # by field of Training: the stack's own option that says the same
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

    def own_head(self, run: Any) -> bool:
        """Whether the head of `run` is a unit of FSDP2, and the embedding another; tied ones are none."""
        return False

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 leaves a head of `own_head` gathered from forward to backward."""
        return False

    def steps_in_backward(self, run: Any) -> bool:
        """Whether each parameter of `run` is updated as soon as it has its gradient."""
        return False

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError where an option cannot go with the run's fields `given`."""

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
    is the implementation of AdamW. Releases before 0.2.0 take FlashAttention 2 first: the run's attention="flash".
    """

    name = "torchtitan"
    package = "torchtitan"
    families = ("llama", "qwen3")
    expandable_segments = True  # run_train.sh
    own_names: ClassVar[Mapping[str, str]] = {"checkpointing": "ac", "zero": "reshard_after_forward"}
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("mixed-bf16", "autocast-bf16", "fp32"),
        "optimizer": ("adamw",),
        "attention": ("sdpa", "flash"),
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

    def own_head(self, run: Any) -> bool:
        """The final norm and the head are a unit, the embedding is another (infra/parallelize.py, apply_fsdp)."""
        return True

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
    """Megatron-LM's options that change memory or time, by the names of its arguments (megatron/training/arguments.py).

    `recompute` is --recompute-granularity, None the run's `checkpointing`. "selective" computes `recompute_modules`
    again, of "core_attn" and "mlp". "full" keeps the input of every `recompute_num_layers` layers ("uniform"), or
    the inputs of so many layers of each virtual stage, and the others whole ("block").

    `transformer_engine`: layers of Transformer Engine, or Megatron's own with Apex (--transformer-impl local).
    `masked_softmax_fusion`: softmax of unfused attention (attention="eager") as one kernel in half precision; without
    Apex, Megatron's own layers take PyTorch's, in fp32. `accumulate_allreduce_grads_in_fp32`: None is Megatron's
    default, True for bf16. `tp_comm_overlap` hides what tensor parallelism sends behind the products before and after
    it (Transformer Engine's userbuffers). `virtual_pipeline` is the model chunks of a rank
    (--num-virtual-stages-per-pipeline-rank), `make_vocab_size_divisible_by` pads the vocabulary of each tensor-parallel
    rank. The distributed optimizer is the run's zero=1, sequence parallelism its sequence_parallel,
    --attention-backend unfused its attention="eager".
    """

    name = "megatron"
    package = "megatron"
    families = ("gpt2", "llama", "mistral", "qwen2", "phi3")
    own_names: ClassVar[Mapping[str, str]] = {"checkpointing": "recompute", "virtual_stages": "virtual_pipeline"}
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
    tp_comm_overlap: bool = False
    virtual_pipeline: int = 1
    make_vocab_size_divisible_by: int = 128

    def __post_init__(self) -> None:
        self._check_counts("recompute_num_layers", "virtual_pipeline", "make_vocab_size_divisible_by")
        self._check_choices(
            recompute=(None, *get_args(Recompute)),
            recompute_method=(None, *get_args(RecomputeMethod)),
            transformer_engine=(True, False),
            masked_softmax_fusion=(True, False),
            tp_comm_overlap=(True, False),
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
        ends = {0, len(stages) - 1} if min(stages) < max(stages) else set()  # there embedding and head are layers too
        if any((layers + (stage in ends)) % chunks for stage, layers in enumerate(stages)):
            raise SpecError(f"{given} does not divide the layers of each stage, {', '.join(map(str, stages))}")


@dataclass(frozen=True, repr=False)
class Torchtune(StackOptions):
    """torchtune's options that change memory, by the names of its recipes' configurations.

    `enable_activation_checkpointing` recomputes every block; None follows the run's `checkpointing`, and where that is
    None too is what the configurations of Llama 3.1 8B have: True, but for LoRA on several devices.
    `enable_activation_offloading` moves what is kept to the host. `optimizer` is "AdamW" (torch's, fused), or
    bitsandbytes' "AdamW8bit" and "PagedAdamW8bit", whose states lie outside of PyTorch's allocator; None follows the
    run's `optimizer`, and where that says nothing is PagedAdamW8bit for a full fine-tune on one device. There the
    optimizer also steps in backward (`optimizer_in_bwd`), unless micro-batches are accumulated.
    `num_output_chunks` are those of CEWithChunkedOutputLoss, 0 stands for torch's CrossEntropyLoss of logits that were
    cast to fp32. `packed`: several samples share a sequence, and each token brings its position.
    `fsdp_reshard_after_forward` and `custom_sharded_layers` are FSDP2's, of the recipes for several devices: units of
    their own beside blocks, () or ("tok_embeddings", "output"), which None takes for a full fine-tune.
    """

    name = "torchtune"
    package = "torchtune"
    families = ("llama",)
    ties_heads = True
    own_names: ClassVar[Mapping[str, str]] = {
        "checkpointing": "enable_activation_checkpointing",
        "optimizer": "optimizer",
        "zero": "fsdp_reshard_after_forward",
    }
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "precision": ("bf16", "fp32"),
        "optimizer": ("adamw", "adamw-8bit"),
        "checkpointing": (None, "full"),
        "attention": ("sdpa",),
        "quantization": (None, "nf4"),
        "zero": (0, 2, 3),
        "tp": (1,),
        "pp": (1,),
        "cp": (1,),
        "ep": (1,),
        "dp_replicate": (1,),
        "offload": (None,),
        "kernels": (None,),
        "fp8": (None,),
    }

    enable_activation_checkpointing: bool | None = None
    enable_activation_offloading: bool = False
    optimizer: TuneOptimizer | None = None
    optimizer_in_bwd: bool | None = None
    num_output_chunks: int = 8
    packed: bool = False
    fsdp_reshard_after_forward: bool = True
    custom_sharded_layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_output_chunks:
            self._check_counts("num_output_chunks")
        self._check_choices(
            enable_activation_checkpointing=(None, True, False),
            enable_activation_offloading=(True, False),
            optimizer=(None, *get_args(TuneOptimizer)),
            optimizer_in_bwd=(None, True, False),
            packed=(True, False),
            fsdp_reshard_after_forward=(True, False),
        )
        layers = self.custom_sharded_layers
        if layers is None:
            return
        layers = tuple(layers.split() if isinstance(layers, str) else layers)
        if layers and set(layers) != SHARDED_ALONE:
            raise SpecError(f"custom_sharded_layers={layers!r} is neither () nor ('tok_embeddings', 'output')")
        object.__setattr__(self, "custom_sharded_layers", layers)

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return True

    def own_head(self, run: Any) -> bool:
        """Whether the head of `run` is a unit of FSDP2, and the embedding another; tied ones are none."""
        return run.lora is None if self.custom_sharded_layers is None else bool(self.custom_sharded_layers)

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 leaves the head gathered from forward to backward."""
        return not self.fsdp_reshard_after_forward

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """bf16 throughout; on several devices FSDP2."""
        sharded, full = given["dp"] > 1, given["lora"] is None
        recomputes = self.enable_activation_checkpointing
        if recomputes is None:
            recomputes = full or not sharded
        narrow = self.optimizer != "AdamW" and (self.optimizer is not None or (full and not sharded))
        return {
            "precision": "bf16",
            "checkpointing": "full" if recomputes else None,
            "optimizer": "adamw-8bit" if narrow else "adamw",
            "zero": (3 if self.fsdp_reshard_after_forward else 2) if sharded else 0,
        }

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError where an option cannot go with the run's fields `given`."""
        if self.optimizer_in_bwd and given["accumulation"] > 1:
            told = f"accumulation={given['accumulation']} with Torchtune(optimizer_in_bwd=True)"
            raise SpecError(f"{told}: nothing is left of a gradient to add to; give accumulation=1 or leave it out")
        if self.optimizer_in_bwd and given["lora"]:
            raise SpecError("lora with Torchtune(optimizer_in_bwd=True): the LoRA recipes have no such option; drop it")
        if self.enable_activation_offloading and given["checkpointing"] is None:
            raise SpecError("enable_activation_offloading=True without checkpointing: torchtune offloads what a "
                            "recomputed block keeps; give enable_activation_checkpointing=True")  # fmt: skip

    def paged(self, run: Any) -> bool:
        """Whether the states of `run` lie in memory that the driver pages."""
        chosen = self.optimizer is None and run.lora is None and run.dp == 1
        return run.optimizer == "adamw-8bit" and (self.optimizer == "PagedAdamW8bit" or chosen)

    def steps_in_backward(self, run: Any) -> bool:
        """Whether each parameter of `run` is updated as soon as it has its gradient."""
        if self.optimizer_in_bwd is None:
            return run.lora is None and run.dp == 1 and run.accumulation == 1
        return self.optimizer_in_bwd


STACKS: dict[str, type[StackOptions]] = {stack.name: stack for stack in (Torchtitan, Megatron, Torchtune)}


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
    stack.check_run(given)
    for field, value in stack.sets(given).items():
        option = stack.own_names.get(field)
        if option is None or value == given[field]:
            continue
        said = getattr(stack, option)
        if said is not None:  # else the run says it, and the stack nothing
            own = f"{type(stack).__name__}({option}={said!r})"
            raise SpecError(f"{field}={given[field]!r} with stack={own}, which is {field}={value!r}; give one of them")
