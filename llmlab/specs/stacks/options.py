"""The base class of a stack's options: the fields of a run that they set, and the runs that they refuse."""

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
    """A stack's options and the facts about its code that formulas and simulations need; `stack_of(run)` returns them.

    The defaults hold for most stacks, and each stack's file lists the differences. `name` is the stack's name;
    `allowed` are the values of Training's fields that it supports, if not all.
    Raises SpecError for an option that this stack does not have; the message names the stacks that have it.
    """

    name: ClassVar[str]
    has_package: ClassVar[bool] = True  # whether a simulation imports a package of its name; else it is not simulated
    allowed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    unsupported_options: ClassVar[Mapping[str, str]] = {}  # by option or field of its code: why it is unsupported
    own_names: ClassVar[Mapping[str, str]] = {}  # by field of Training: the stack's option that sets it
    families: ClassVar[tuple[str, ...]] = ()  # the values of ModelSpec.family that are described; empty: all

    own_program: ClassVar[bool] = True  # whether its own code runs the step (simulation/stacks), not llmlab's (step)
    own_model: ClassVar[bool] = True  # whether the model has the stack's class, not transformers'
    own_zero: ClassVar[bool] = False  # whether it has its own ZeRO engine, which also runs on one rank, not torch's
    own_kernels: ClassVar[bool] = False  # whether blocks run its own kernels, also for attention, not torch's
    own_sums: ClassVar[bool] = False  # whether gradients are accumulated in its own buffers, not in .grad tensors
    spreads_experts: ClassVar[bool] = False  # whether ep divides all ranks of a stage, not only data-parallel ones
    own_experts: ClassVar[bool] = False  # whether a block's experts are their own FSDP2 unit under expert parallelism
    copies_gathered: ClassVar[bool] = False  # whether ZeRO-1 copies all weights after the update, and NCCL copies again
    ties_heads: ClassVar[bool] = False  # whether models with a tied head are described
    half_adapters: ClassVar[bool] = False  # whether adapters have the 16-bit dtype of frozen weights, not fp32
    torchao_nf4: ClassVar[bool] = False  # whether nf4 weights are torchao's NF4Tensor, not bitsandbytes'
    flat_parameters: ClassVar[bool] = False  # whether FSDP1 shards a model in full fine-tuning
    reshards_model: ClassVar[bool] = False  # whether FSDP2 frees weights outside the blocks after the forward pass
    loss_after_model: ClassVar[bool] = False  # whether FSDP's model returns before the loss is computed
    lists_kernels: ClassVar[bool] = False  # whether it allows SDPA only some kernels, not the memory-efficient one
    recomputes_every_second_matmul: ClassVar[bool] = False  # whether "selective" recomputes every second matmul
    dtensors: ClassVar[bool] = True  # whether tensor parallelism shards parameters as DTensors
    torch_stages: ClassVar[bool] = False  # whether buffers of torch's PipelineStage are counted
    counts_embedding_and_head_as_layers: ClassVar[bool] = False  # in a pipeline, by default
    models_embedding_backward: ClassVar[bool] = False  # whether the memory of sums over equal tokens is counted
    counts_hooks: ClassVar[bool] = False  # whether the host time of FSDP2's hooks and of DTensor is counted
    timed_pipelines: ClassVar[bool] = False  # whether our rates come from its own pipelines, not from other engines
    pads_vocabulary: ClassVar[bool] = False  # whether rows of logits are padded to multiples of 16 bytes
    names_cuda: ClassVar[bool] = False  # whether its code, like a user's script, names the device "cuda" itself
    chooses_zero: ClassVar[bool] = False  # whether it chooses the ZeRO stage, so that a plan does not

    # Options of one stack, by its own names, each with the value that holds for all others.
    expandable_segments: bool = False  # whether its launcher sets them in the allocator
    recompute_modules: tuple[str, ...] = ()  # the modules of a block that "selective" recomputes, each as a whole
    keeps_attention: bool = True  # whether "selective" saves the output of fused attention
    enable_activation_offloading: bool = False  # whether blocks' saved activations are on the host
    num_output_chunks: int = 0  # the number of chunks in which the head is called
    virtual_pipeline: int | None = None  # virtual stages per rank, which a plan may vary; None: no such option
    fp8_recipe: str | None = None  # of Transformer Engine's matmuls
    fp8_param_gather: bool = False  # whether Transformer Engine's fp8 weights are the parameters
    enable_fsdp_float8_all_gather: bool = True  # whether FSDP2 gathers in fp8, with tensorwise scales
    compile_loss: bool = True  # whether a compiled step has a compiled loss
    norm_type: str = ""  # of RMSNorm, if the stack has several
    transformer_engine: bool = False  # whether Transformer Engine provides the layers
    tp_comm_overlap: bool = False  # whether tensor parallelism sends in parts, overlapped with matmuls
    overlap_param_gather: bool = False  # whether ZeRO-1's all-gathers overlap with the forward pass
    gradient_accumulation_fusion: bool = False  # whether a matmul adds to a weight's accumulated gradient
    cross_entropy_fusion_impl: str | None = None  # of the loss
    expert_tensor_parallel_size: int | None = None  # the ranks that divide each expert; None: those of tp
    moe_flex_dispatcher_backend: str | None = None  # which sends a token to a rank once; None: all-to-all
    overlap_moe_expert_parallel_comm: bool = False  # whether computation hides the communication with experts
    use_transformer_engine_op_fuser: bool = False  # whether experts' matmuls compute SwiGLU and cast its result
    deepspeed: bool = False  # whether DeepSpeed's engine runs Megatron-LM's model
    cuda_launch_blocking: bool = False  # whether the host waits for each kernel
    cuda_graph_impl: str | None = None  # CUDA graphs: of all passes of a step, or of modules
    cuda_graph_modules: tuple[str, ...] = ()  # these modules

    def __new__(cls, *args: Any, **options: Any) -> StackOptions:
        for option in options:
            if option not in (names := [f.name for f in fields(cls)]):
                if why := cls.unsupported_options.get(option):
                    raise SpecError(f"{cls.name}'s {option} is not supported here: {why}")
                stacks = StackOptions.__subclasses__()
                owners = [stack.name for stack in stacks if option in {f.name for f in fields(stack)}]
                hint = f"it is an option of {' and '.join(owners)}" if owners else "no stack has it"
                raise SpecError(f"{cls.name} has no option {option}: {hint}; {cls.name} has "
                                f"{', '.join(names) or 'none'}")  # fmt: skip
        return super().__new__(cls)

    @property
    def fused_adamw(self) -> bool:
        """Whether AdamW updates in place, without temporaries."""
        return False

    @property
    def sums_in_fp32(self) -> bool:
        """Whether the 16-bit gradients of micro-batches are accumulated in a permanent fp32 buffer, unsharded on each
        rank."""
        return False

    @property
    def keeps_ddp(self) -> bool:
        """Whether torch's DDP reduces gradients although ZeRO-1's optimizer has an fp32 copy of the weights."""
        return False

    @property
    def recomputes_one_in(self) -> int:
        """The n of "every n-th block is recomputed as a whole"; 0 if "selective" recomputes parts of every block."""
        return 0

    @property
    def checks_losses(self) -> bool:
        """Whether the host waits for each micro-batch's loss before the backward pass, to check it for NaN."""
        return False

    @property
    def counts_tokens_on_host(self) -> bool:
        """Whether each forward pass of experts waits until the host knows the number of tokens of each expert."""
        return False

    @property
    def mtp_layers(self) -> int:
        """The number of modules for multi-token prediction after the last layer."""
        return 0

    @property
    def checks_gradients(self) -> bool:
        """Whether the host waits for gradients before the update, to check them for overflow or to read their norm."""
        return self.checks_losses

    @property
    def hides_sends(self) -> bool:
        """Whether communication between stages overlaps with the computation of another chunk."""
        return False

    @property
    def without_lora(self) -> str:
        """The reason why no plan trains adapters with it; empty if a plan may."""
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
        """Whether the optimizer states of `run` are in paged memory, which the driver moves between GPU and host."""
        return False

    def overlap(self, run: Any) -> tuple[str, ...]:
        """Return the communication that overlaps with computation, from formulas.time.distributed.OVERLAPS."""
        return ("data",)

    def recomputed_blocks(self, run: Any, layers: int) -> int:
        """Return how many of a rank's `layers` recompute something in the backward pass, if checkpointing is on."""
        return layers // (self.recomputes_one_in or 1)

    def layers_of(self, spec: ModelSpec, stages: int) -> tuple[int, ...] | None:
        """Return the number of layers of each stage if the stack divides them by cost, else None."""
        return None

    def own_head(self, run: Any) -> bool:
        """Whether the head of `run` is an FSDP2 unit, and the embedding another; tied ones are not."""
        return False

    @property
    def keeps_head(self) -> bool:
        """Whether FSDP2 keeps the head gathered from the forward to the backward pass, if it is its own unit."""
        return False

    def steps_in_backward(self, run: Any) -> bool:
        """Whether each parameter of `run` is updated in the backward pass, as soon as it has its gradient."""
        return False

    def __post_init__(self) -> None:
        """Raise SpecError for an option with a value that its type does not list."""
        stack: Any = type(self)
        self._check_choices(**_choices(stack))

    def check_run(self, given: Mapping[str, Any]) -> None:
        """Raise SpecError if an option contradicts the run's fields `given`."""

    def check_model(self, spec: ModelSpec, run: Any, stages: tuple[int, ...]) -> None:
        """Raise SpecError if the stack cannot train `spec`; `stages` are the numbers of layers per stage."""

    def sets(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of Training's fields that the stack sets unless they were given; `given` are all fields."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Return the stack's name and the options as JSON-ready values."""
        return {"name": self.name, **super().to_dict()}


@cache
def _choices(stack: Any) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of each option that is a bool or lists its values."""
    hints = get_type_hints(stack)
    listed = {f.name: _listed(hints[f.name]) for f in fields(stack)}
    return {option: values for option, values in listed.items() if any(values)}


def _listed(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return True, False
    if type(None) in get_args(hint):
        return None, *(value for member in get_args(hint) if member is not type(None) for value in _listed(member))
    return get_args(hint) if all(isinstance(value, str) for value in get_args(hint)) else ()
