"""What a stack's options are: what they set where a run says nothing, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from ...base.errors import SpecError
from ..fields import Spec

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..model import ModelSpec


class StackOptions(Spec):
    """A stack's options, and facts of its code, by which formulas and simulations tell stacks apart: `stack_of(run)`
    has them. The defaults are true of most stacks; a stack's own file says what differs. `name` is the stack's;
    `allowed` the values of Training's fields that it has, where not all.

    Raises SpecError for an option that this stack has not, and names the stack that has it.
    """

    name: ClassVar[str]
    has_package: ClassVar[bool] = True  # whether simulating it imports a package of its name; else it is not simulated
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unsupported_options: ClassVar[Mapping[str, str]] = {}  # options, or values of fields, that its code has: why not
    own_names: ClassVar[Mapping[str, str]] = {}  # by field of Training: the stack's own option that says the same
    families: ClassVar[tuple[str, ...]] = ()  # of models that are described, of ModelSpec.family; empty: all

    own_program: ClassVar[bool] = True  # whether its own code makes the step (simulation/stacks), not llmlab's (step)
    own_model: ClassVar[bool] = True  # whether it has a class of its own for the model, not transformers'
    own_zero: ClassVar[bool] = False  # whether ZeRO is its own engine's, which runs on one rank too, not torch's
    own_kernels: ClassVar[bool] = False  # whether blocks run kernels of its own, attention's too, not those of torch
    own_sums: ClassVar[bool] = False  # whether micro-batches' gradients are added to its own buffers, not to tensors
    own_experts: ClassVar[bool] = False  # whether experts that ranks share out are a unit of FSDP2 within a block's
    copies_gathered: ClassVar[bool] = False  # whether ZeRO-1 copies all weights after the update, and NCCL again
    ties_heads: ClassVar[bool] = False  # whether models whose head is the embedding are described
    half_adapters: ClassVar[bool] = False  # whether LoRA's are in the dtype of half frozen weights, not in fp32
    torchao_nf4: ClassVar[bool] = False  # whether nf4 weights are torchao's NF4Tensor, not bitsandbytes'
    flat_parameters: ClassVar[bool] = False  # whether FSDP1 shards a model that is trained whole
    reshards_model: ClassVar[bool] = False  # whether FSDP2 frees what is outside of blocks after forward
    loss_after_model: ClassVar[bool] = False  # whether FSDP's model returns before the loss is computed
    lists_kernels: ClassVar[bool] = False  # whether it names SDPA's kernels, all but the memory-efficient one
    recomputes_every_second_matmul: ClassVar[bool] = False  # whether "selective" recomputes every second product
    dtensors: ClassVar[bool] = True  # whether tensor parallelism cuts parameters by DTensor
    torch_stages: ClassVar[bool] = False  # whether buffers of torch's PipelineStage are counted
    counts_embedding_and_head_as_layers: ClassVar[bool] = False  # of a pipeline, by default
    models_embedding_backward: ClassVar[bool] = False  # sums over equal tokens are counted
    counts_hooks: ClassVar[bool] = False  # whether the host's time for FSDP2's hooks and for DTensor is counted
    timed_pipelines: ClassVar[bool] = False  # whether rates come from its own pipelines, not from unnamed engines'
    pads_vocabulary: ClassVar[bool] = False  # whether rows of logits are padded to whole 16 bytes
    names_cuda: ClassVar[bool] = False  # whether its code names the device "cuda" itself, as users' scripts do
    chooses_zero: ClassVar[bool] = False  # whether a plan leaves the stage of ZeRO to it

    # Options that one stack has, by its own names, and what is true of all others.
    expandable_segments: bool = False  # whether its launcher sets them for the allocator
    recompute_modules: tuple[str, ...] = ()  # the modules of a block that "selective" recomputes, each to its end
    keeps_attention: bool = True  # whether "selective" keeps what fused attention returned
    enable_activation_offloading: bool = False  # whether the host keeps what blocks keep
    num_output_chunks: int = 0  # so many chunks of its input the head is called on one by one
    virtual_pipeline: int | None = None  # virtual stages of a rank that a plan may vary; None: it has no such option
    fp8_recipe: str | None = None  # of Transformer Engine's products
    fp8_param_gather: bool = False  # whether Transformer Engine's fp8 weights are the parameters
    enable_fsdp_float8_all_gather: bool = True  # whether FSDP2 gathers in fp8 what torchao casts by tensor
    compile_loss: bool = True  # whether a compiled step has a compiled loss
    norm_type: str = ""  # of RMSNorm, where the stack has several
    transformer_engine: bool = False  # whether layers are Transformer Engine's
    tp_comm_overlap: bool = False  # whether what tensor parallelism sends goes in parts behind products
    overlap_param_gather: bool = False  # whether ZeRO-1 gathers parameters behind forward
    gradient_accumulation_fusion: bool = False  # whether products add weights' gradients to their sums themselves
    cross_entropy_fusion_impl: str | None = None  # of the loss
    deepspeed: bool = False  # whether DeepSpeed's engine runs Megatron-LM's model
    cuda_launch_blocking: bool = False  # whether the host waits for each kernel
    cuda_graph_impl: str | None = None  # of one CUDA graph that has all passes of a step

    def __new__(cls, *args: Any, **options: Any) -> StackOptions:
        for option in options:
            if option not in (own := [f.name for f in fields(cls)]):
                if why := cls.unsupported_options.get(option):
                    raise SpecError(f"{cls.name}'s {option} is not supported here: {why}")
                stacks = StackOptions.__subclasses__()
                others = [one.name for one in stacks if option in {f.name for f in fields(one)}]
                whose = f"it is an option of {' and '.join(others)}" if others else "no stack has it"
                raise SpecError(f"{cls.name} has no option {option}: {whose}; {cls.name} has "
                                f"{', '.join(own) or 'none'}")  # fmt: skip
        return super().__new__(cls)

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return False

    @property
    def sums_in_fp32(self) -> bool:
        """Whether each micro-batch's half gradients are added to a buffer in fp32 that stays, whole on each rank."""
        return False

    @property
    def keeps_ddp(self) -> bool:
        """Whether torch's DDP sums gradients where ZeRO-1's optimizer has an fp32 copy."""
        return False

    @property
    def recomputes_one_in(self) -> int:
        """Of how many blocks one is recomputed, whole; 0 where "selective" means parts of all."""
        return 0

    @property
    def checks_losses(self) -> bool:
        """Whether the host waits for each micro-batch's loss before backward, to see whether it is a number."""
        return False

    @property
    def checks_gradients(self) -> bool:
        """Whether the host waits for gradients before the update, to see whether they are numbers."""
        return self.checks_losses

    @property
    def hides_sends(self) -> bool:
        """Whether what stages send each other is behind the computation of another chunk."""
        return False

    @property
    def without_lora(self) -> str:
        """Why no plan trains adapters with it; empty where one may."""
        return f"{self.name} has no lora" if self.allowed.get("lora") == (None,) else ""

    @classmethod
    def of(cls, run: Any) -> Self:
        """Return the options of a run that this stack trains."""
        assert isinstance(run.stack, cls)
        return run.stack

    def accumulates_in_fp32(self, dtype: str) -> bool:
        """Whether gradients of a run in `dtype` are summed over micro-batches and ranks in fp32."""
        return self.sums_in_fp32

    def paged(self, run: Any) -> bool:
        """Whether the states of `run` lie in memory that the driver pages."""
        return False

    def overlap(self, run: Any) -> tuple[str, ...]:
        """Return what hides behind computation, of formulas.time.distributed.OVERLAPS."""
        return ("data",)

    def recomputed_blocks(self, run: Any, layers: int) -> int:
        """Return of how many blocks, of a rank's `layers`, backward computes something again where it does at all."""
        return layers // (self.recomputes_one_in or 1)

    def layers_of(self, spec: ModelSpec, stages: int) -> tuple[int, ...] | None:
        """Return how many layers each of `stages` has, if they are divided by cost; else None."""
        return None

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

    def __post_init__(self) -> None:
        """Raise SpecError for an option whose value is none of those that its type lists."""
        stack: Any = type(self)
        self._check_choices(**_choices(stack))

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError where an option cannot go with the run's fields `given`."""

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError for what the stack does not train of `spec`; `stages` are their numbers of layers."""

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that fields of Training take unless they were given; `given` are all fields."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the stack's name and the options as JSON-ready values."""
        return {"name": self.name, **super().to_dict()}


@cache
def _choices(stack: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values that options may have, of those that are True or False, or whose names are listed."""
    hints = get_type_hints(stack)
    listed = {f.name: _listed(hints[f.name]) for f in fields(stack)}
    return {option: values for option, values in listed.items() if any(values)}


def _listed(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return True, False
    if type(None) in get_args(hint):
        return None, *(value for each in get_args(hint) if each is not type(None) for value in _listed(each))
    return get_args(hint) if all(isinstance(value, str) for value in get_args(hint)) else ()
