"""The run to estimate, simulate or measure: a training step or a generation, as plain data that checks itself.

>>> Training(micro_batch=2, seq_len=2048, precision="autocast-bf16")
Training(micro_batch=2, seq_len=2048, precision='autocast-bf16')
>>> Training(precision="fp17")  # doctest: +ELLIPSIS, +IGNORE_EXCEPTION_DETAIL
Traceback (most recent call last):
llmlab.base.errors.SpecError: precision='fp17' is not one of fp32, fp16, bf16, autocast-fp16, autocast-bf16, ...
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..base.errors import SpecError
from ..base.terms import (
    ATTENTIONS,
    CHECKPOINTING,
    FP8,
    FP8_RECIPES,
    HALF_LAYERS,
    KERNELS,
    KV_DTYPES,
    OFFLOADS,
    OPTIMIZERS,
    PRECISIONS,
    QUANTIZATIONS,
    REDUCE_DTYPES,
    SCHEDULES,
    WEIGHTS,
    Attention,
    Checkpointing,
    HalfLayers,
    Kernels,
    KVDtype,
    Offload,
    OptimizerName,
    Precision,
    Quantization,
    ReduceDtype,
    Schedule,
    Weights,
)
from .fields import MOST, ChoiceSpec
from .methods import METHOD_NAMES, METHODS, REFERENCES, Method, MethodName, Reference
from .stacks import TRANSFORMERS, StackOptions, check_stack, options_of, resolved, stack_from_dict

if TYPE_CHECKING:
    from ..engines.readers import Settings


@dataclass(frozen=True, repr=False)
class LoRA(ChoiceSpec):
    """Low-rank adapters on the named linear layers (Hu et al., arXiv 2106.09685).

    `rank` r adds r · (inputs + outputs) trainable parameters to each targeted linear layer; everything else is frozen.
    `targets` are names of layers, or ("all-linear",) for all but the head, as in peft.
    `alpha` is the numerator of the scale alpha / r; None is 2 · rank. `autocast_adapter_dtype` is peft's argument: True
    keeps adapters in fp32 even if the frozen weights have 16 bits. False keeps them in the dtype of the frozen weights,
    as torchtune and AutoModel do; the unquantized weights of a quantized model also keep that dtype, although peft's
    preparation would cast them to fp32.
    """

    rank: int = 16
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    alpha: int | None = None
    dropout: float = 0.0
    autocast_adapter_dtype: bool = True

    def __post_init__(self, unset: frozenset[str]) -> None:
        super().__post_init__(unset)
        self._check_counts("rank")
        targets = self.targets
        listed = isinstance(targets, (tuple, list)) and targets
        if not listed or not all(isinstance(name, str) and name for name in targets):
            raise SpecError(f"targets={targets!r} has no names of layers; give, for example, targets=('q_proj', "
                            "'v_proj')")  # fmt: skip
        object.__setattr__(self, "targets", tuple(targets))
        if self.alpha is not None:
            self._check_counts("alpha")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise SpecError(f"dropout={self.dropout!r} is not a number with 0 <= dropout < 1")
        if not isinstance(self.autocast_adapter_dtype, bool):
            raise SpecError(f"autocast_adapter_dtype={self.autocast_adapter_dtype!r} is neither True nor False")


COUNTS = ("micro_batch", "seq_len", "accumulation", "dp", "tp", "pp", "cp", "ep", "dp_replicate", "virtual_stages")
SWITCHES = ("double_quant", "sync_each_batch", "sequence_parallel", "loss_parallel", "compile")
CHOICES: dict[str, tuple[object, ...]] = {
    "precision": PRECISIONS, "optimizer": OPTIMIZERS, "checkpointing": CHECKPOINTING, "attention": ATTENTIONS,
    "quantization": QUANTIZATIONS, "half_layers": HALF_LAYERS, "zero": (0, 1, 2, 3), "offload": OFFLOADS,
    "kernels": KERNELS, "fp8": FP8_RECIPES, "schedule": SCHEDULES, "reduce_dtype": REDUCE_DTYPES,
    "method": METHOD_NAMES, "reference": REFERENCES, **dict.fromkeys(SWITCHES, (True, False)),
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Training(ChoiceSpec):
    """One training step: the work of each device, its precision, and how many devices share the model and the data.
    Raises SpecError for a value that is not allowed, and for fields that contradict each other.

    `micro_batch` sequences of `seq_len` tokens go through the model together on each data-parallel rank, and an
    optimizer step accumulates the gradients of `accumulation` micro-batches. With attention="flash", packed documents
    or a batch without padding cost as much as `micro_batch` documents of their mean length. `dp`, `tp`, `pp`, `cp`,
    `ep` are the degrees of data, tensor, pipeline, context and expert parallelism; `zero` is the ZeRO stage over the
    data-parallel ranks. `expert_imbalance` is the number of tokens that the busiest expert-parallel rank receives,
    divided by the mean of all ranks: every layer waits for such a rank, and the memory is that of a rank which is the
    busiest in every layer. `schedule` is the order of a pipeline's micro-batches; it is interleaved if `virtual_stages`
    (per rank) is more than 1. `dp_replicate` is the number of replicas of the sharded model (HSDP; torchtitan's name):
    each replica is sharded over `dp_shard` ranks.
    `sync_each_batch` (Accelerate's name): FSDP reduces gradients after each micro-batch. With False, the default of
    Accelerate and the Trainer, it reduces only after the last, and each rank accumulates whole gradients. DDP always
    waits for the last. `reduce_dtype` (FSDP2's name): the dtype in which FSDP reduces gradients in mixed precision,
    fp32 or the 16-bit dtype of the run.
    `optimizer`: "adamw" is torch's default, which on a GPU updates lists of tensors and allocates temporary tensors for
    their square roots; "adamw-fused" (fused=True, the Trainer's default) is one kernel without temporaries. "muon" is
    torch's Muon for the matrices of blocks, with AdamW for all other parameters.
    `quantization`: bitsandbytes quantizes to "nf4" or "int8" when the model is loaded. "gptq" is a 4-bit checkpoint,
    which AutoGPTQ's layer unpacks with PyTorch operators for each matmul (formulas/gptq.py). `double_quant`: the scales
    of "nf4" are quantized, too (bnb_4bit_use_double_quant).
    `half_layers`: the frozen layers whose weights are in the 16 bits of an autocast-* precision; adapters are in fp32.
    "all" is a model that was loaded in 16 bits: with the Trainer's bf16=True, or quantized as LLaMA-Factory prepares
    it. "embeddings" are the embedding and the head of a quantized model. With None, frozen weights are in fp32, as
    after peft's prepare_model_for_kbit_training.
    `loss_parallel`: each tensor-parallel rank computes the loss of its part of the vocabulary (torch's loss_parallel,
    Megatron-LM's parallel_output); False gathers whole logits on each rank, as transformers' tp_plan does.
    `kernels`: "liger" are Liger's kernels, "fused-loss" is the cross entropy of the package flash-attn, which does not
    copy the logits, and "fused-norm" is RMSNorm as one kernel, here torch's `rms_norm`.
    `fp8` is torchao's recipe for fp8 matmuls in the blocks' linear layers (formulas/memory/float8.py).
    `images`: images in each sequence of a vision-language model. Their tokens are part of `seq_len`. `pixels` is the
    size of each image before the model's processor resizes it, as a number of pixels (1024*1024 for a square image) or
    as (height, width). `num_labels`: train a sequence classifier with this many classes (1: a regression, such as a
    reward model) instead of a language model.

    `method` is the training method, as in TRL's trainers (specs/methods.py). A sample of "dpo", "orpo" and "reward" is
    a pair of sequences, both of which are in the batch. `reference` is the source of the reference model's
    log-probabilities. None means "adapter" with LoRA and "kept" without; for "grpo", it means no reference model and no
    KL term.
    `teacher` is the model to "distill" from, by default one of the same sizes. "ppo" and "grpo" count completions in
    `micro_batch`; a completion is the last `completion_len` tokens of a sequence, and `generations` of them share a
    prompt. With a `mean_completion_len`, completions differ in length (serving/rollout.py), and `completion_len` is the
    maximum, to which training pads them, as TRL does. A vLLM engine on the same GPU generates them with the share
    `gpu_memory_utilization` of the memory (TRL's default), and sleeps while the model trains.

    `stack` names the code that trains: "transformers", another stack's name, or that stack's options, such as
    `lab.Torchtitan(ac="full")`. A name stands for the options with that stack's defaults. Fields that were not given,
    whose names are in `unset`, get the values that the stack sets, and the printed run shows them. A field that was
    given keeps its value even if that is the default; if the stack does not support it, SpecError says so. A run that
    is read from JSON has every field given.
    """

    micro_batch: int = 1
    seq_len: int = 1024
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    checkpointing: Checkpointing | None = None
    attention: Attention = "sdpa"
    accumulation: int = 1
    lora: LoRA | None = None
    quantization: Quantization | None = None
    double_quant: bool = False
    half_layers: HalfLayers | None = None
    zero: int = 0
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_imbalance: float = 1.0
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    dp_replicate: int = 1
    sync_each_batch: bool = True
    reduce_dtype: ReduceDtype = "fp32"
    sequence_parallel: bool = False
    loss_parallel: bool = True
    offload: Offload | None = None
    compile: bool = False
    kernels: Kernels | None = None
    fp8: FP8 | None = None
    images: int = 0
    pixels: int | tuple[int, int] | None = None
    num_labels: int | None = None
    method: MethodName = "sft"
    reference: Reference | None = None
    teacher: str | None = None
    completion_len: int | None = None
    mean_completion_len: int | None = None
    generations: int = 8
    gpu_memory_utilization: float = 0.3
    stack: StackOptions | str = TRANSFORMERS

    def __post_init__(self, unset: frozenset[str]) -> None:
        super().__post_init__(unset)
        self._check_counts(*COUNTS)
        self._check_choices(**CHOICES)
        if self.lora is not None and not isinstance(self.lora, LoRA):
            example = "lora=lab.LoRA(rank=16, targets=('q_proj', 'v_proj'))"
            raise SpecError(f"lora={self.lora!r} is not a LoRA; write {example}")
        object.__setattr__(self, "stack", resolved(self.stack))
        if isinstance(self.stack, StackOptions):
            defaults = {f.name: f.default for f in fields(self) if f.name in vars(self)["unset"]}
            vars(self).update(defaults)  # after `replace`, they may still be those of another stack
            stack_values = self.stack.sets(self.values())
            vars(self).update({name: value for name, value in stack_values.items() if name in defaults})
        if self.lora is not None:
            object.__setattr__(self, "lora", self._adapters(self.lora))
        check_stack(self.stack, self.values())
        if self.quantization is not None and self.lora is None:
            raise SpecError(
                f"quantization={self.quantization!r} without lora: {self.quantization} weights cannot be trained; "
                "add lora=lab.LoRA(...), or leave out quantization"
            )
        self._check_frozen()
        # Engines offload ZeRO's shards, even on one GPU. DeepSpeed runs its stages on one GPU without offload, too.
        unsharded = self.dp * self.cp == 1 and not self.offload
        if self.zero and unsharded and not stack_of(self).own_zero:
            raise SpecError(f"zero={self.zero} needs at least two data-parallel ranks, but dp=1; give dp >= 2, "
                            "or zero=0")  # fmt: skip
        if stack_of(self).spreads_experts:
            sharing, ranks = f"dp × cp × tp / {self.expert_tp}", self.dp * self.cp * self.tp // self.expert_tp
        else:
            sharing, ranks = "dp", self.dp
        if ranks % self.ep:
            raise SpecError(f"ep={self.ep} is not a divisor of {sharing}={ranks}, whose ranks share the experts; give "
                            "one")  # fmt: skip
        self._check_imbalance()
        if self.dp_replicate > 1:
            self._check_replicas()
        self._check_schedule()
        if not self.sync_each_batch:
            self._check_unsynced()
        half = self.reduce_dtype != "fp32"
        if half and (self.zero < 2 or self.precision not in (self.reduce_dtype, f"mixed-{self.reduce_dtype}")):
            option = f"reduce_dtype={self.reduce_dtype!r} with zero={self.zero}, precision={self.precision!r}"
            raise SpecError(f"{option}: it applies to FSDP with that dtype; give zero=2 or 3 and "
                            f"precision='mixed-{self.reduce_dtype}', or leave it out")  # fmt: skip
        if self.sequence_parallel and self.tp == 1:
            raise SpecError("sequence_parallel=True needs at least two tensor-parallel ranks, but tp=1; give tp >= 2, "
                            "or leave it out")  # fmt: skip
        if not self.loss_parallel:
            self._check_gathered_logits()
        if self.fp8:
            self._check_fp8()
        if self.optimizer == "muon":
            self._check_muon()
        if self.method == "reward" and self.num_labels is None:
            vars(self)["num_labels"] = 1
        self._check_task()
        self._check_method()
        if self.offload == "optimizer+parameters" and self.zero != 3:
            raise SpecError(f"offload='optimizer+parameters' needs zero=3; zero={self.zero} was given")

    def _check_task(self) -> None:
        self._check_counts("images", least=0)
        if isinstance(self.pixels, (tuple, list)):
            object.__setattr__(self, "pixels", tuple(self.pixels))
        pixels = self.pixels if isinstance(self.pixels, tuple) else (self.pixels,) * 2
        whole = all(isinstance(side, int) and not isinstance(side, bool) and 1 <= side <= MOST for side in pixels)
        if self.pixels is not None and not (whole and len(pixels) == 2):
            raise SpecError(f"pixels={self.pixels!r} is no image size; give a number of pixels, such as 1024*1024, or "
                            "(height, width)")  # fmt: skip
        if self.pixels is not None and not self.images:
            raise SpecError(f"pixels={self.pixels!r} with images=0: there is no image; give images >= 1, or leave out "
                            "pixels")  # fmt: skip
        if self.num_labels is not None:
            self._check_counts("num_labels")
        option = f"images={self.images}" if self.images else f"num_labels={self.num_labels}"
        if not self.images and self.num_labels is None:
            return
        if (stack := stack_of(self)).own_program:
            raise SpecError(f"{option} with stack={stack.name!r}, which trains language models of text here; "
                            "leave out one of them")  # fmt: skip
        if self.images and self.num_labels is not None:
            raise SpecError(f"{option} with num_labels={self.num_labels}: a classifier is trained on text here; leave "
                            "out one of them")  # fmt: skip
        if self.pp > 1 or self.cp > 1:
            raise SpecError(f"{option} with pp={self.pp}, cp={self.cp} is not supported; give pp=1 and cp=1")
        if self.num_labels is not None and self.kernels in ("liger", "fused-loss"):
            raise SpecError(f"{option} with kernels={self.kernels!r}, whose loss is that of a language model; leave "
                            "out kernels")  # fmt: skip

    def _check_method(self) -> None:
        self._check_counts("generations")
        option, objective = f"method={self.method!r}", self.objective
        for name, applies, value in (
            ("reference", objective.reference, self.reference),
            ("teacher", objective.loss == "teacher", self.teacher),
            ("completion_len", objective.generates, self.completion_len),
            ("mean_completion_len", objective.generates, self.mean_completion_len),
        ):
            if value is not None and not applies:
                raise SpecError(f"{name}={value!r} with {option}, which has none; leave it out")
        if self.method == "sft":
            return
        if (stack := stack_of(self)).name != TRANSFORMERS:
            raise SpecError(f"{option} with stack={stack.name!r}, which trains with next-token loss here; leave out "
                            "stack, or give method='sft'")  # fmt: skip
        limits = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "offload": None, "compile": False, "fp8": None, "images": 0,
                  "kernels": None, "num_labels": 1 if self.method == "reward" else None}  # fmt: skip
        for name, value in limits.items():
            if getattr(self, name) != value:
                raise SpecError(f"{option} with {name}={getattr(self, name)!r} is not supported; give {name}={value!r}")
        if self.reference == "adapter" and not self.lora:
            raise SpecError("reference='adapter' without lora: there are no adapters to switch off; give lora=, or "
                            "reference='kept'")  # fmt: skip
        if self.quantization and (self.reference in ("kept", "offloaded") or objective.critic):
            raise SpecError(f"{option} with quantization={self.quantization!r} and another model in memory is not "
                            "supported; leave out quantization, or give reference='adapter'")  # fmt: skip
        if objective.generates:
            if self.completion_len is None:
                raise SpecError(f"{option} generates its sequences; give completion_len, how many tokens of seq_len="
                                f"{self.seq_len} are generated")  # fmt: skip
            self._check_counts("completion_len")
            if self.completion_len >= self.seq_len:
                raise SpecError(f"completion_len={self.completion_len} leaves no prompt in seq_len={self.seq_len}; "
                                "give fewer tokens")  # fmt: skip
            if self.mean_completion_len is not None:
                self._check_counts("mean_completion_len")
                if self.mean_completion_len > self.completion_len:
                    raise SpecError(f"mean_completion_len={self.mean_completion_len} is more than completion_len="
                                    f"{self.completion_len}, the maximum; give fewer tokens")  # fmt: skip
            if self.global_batch % self.generations:
                raise SpecError(f"generations={self.generations} does not divide the {self.global_batch} completions "
                                "of an update; give a divisor, or more micro_batch or accumulation")  # fmt: skip
        share = self.gpu_memory_utilization
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise SpecError(f"gpu_memory_utilization={share!r}: give a share of the GPU's memory, 0 < share < 1")

    def _adapters(self, lora: LoRA) -> LoRA:
        """Return `lora` with the stack's dtype of adapters, unless one was given. Raises SpecError if the stack does
        not support the one that was given."""
        stack = stack_of(self)
        if "autocast_adapter_dtype" in vars(lora)["unset"]:
            lora = copy(lora)
            object.__setattr__(lora, "autocast_adapter_dtype", not stack.half_adapters)
        elif stack.half_adapters and lora.autocast_adapter_dtype:
            raise SpecError(f"autocast_adapter_dtype=True with stack={stack.name!r}, which trains adapters in the "
                            "dtype of the frozen weights; give False, or another stack")  # fmt: skip
        return lora

    def _check_frozen(self) -> None:
        if self.double_quant and self.quantization != "nf4":
            raise SpecError(f"double_quant=True with quantization={self.quantization!r}: only nf4 has scales that are "
                            "quantized too; give quantization='nf4', or leave it out")  # fmt: skip
        if self.half_layers is None:
            return
        option = f"half_layers={self.half_layers!r} with"
        if self.lora is None or not self.precision.startswith("autocast") or self.quantization == "gptq":
            raise SpecError(f"{option} lora={self.lora!r}, precision={self.precision!r}, quantization="
                            f"{self.quantization!r}: it applies to frozen weights under autocast; give lora and "
                            "precision='autocast-bf16' or 'autocast-fp16', or leave it out")  # fmt: skip
        if self.zero or self.tp * self.pp * self.cp > 1:
            raise SpecError(f"{option} zero={self.zero}, tp={self.tp}, pp={self.pp}, cp={self.cp}: it is described for "
                            "data parallelism without ZeRO; give dp alone")  # fmt: skip
        if self.half_layers == "embeddings" and self.quantization is None:
            raise SpecError(f"{option} quantization=None: nothing is cast to fp32 there; give half_layers='all'")
        if not self.lora.autocast_adapter_dtype:
            raise SpecError(f"{option} autocast_adapter_dtype=False: adapters under autocast are in fp32; leave one of "
                            "them out")  # fmt: skip

    def _check_schedule(self) -> None:
        if self.pp == 1 and (self.schedule != "1f1b" or self.virtual_stages > 1):
            option = f"schedule={self.schedule!r}, virtual_stages={self.virtual_stages}"
            raise SpecError(f"{option} with pp=1: there is no pipeline to schedule; give pp >= 2")
        if self.virtual_stages == 1:
            return
        option = f"virtual_stages={self.virtual_stages} with"
        if self.schedule != "1f1b":
            raise SpecError(f"{option} schedule={self.schedule!r}: only 1F1B can be interleaved; give one of the two")
        if self.accumulation % self.pp:
            raise SpecError(f"{option} accumulation={self.accumulation}: interleaving needs a multiple of pp={self.pp} "
                            "micro-batches")  # fmt: skip

    def _check_unsynced(self) -> None:
        option = "sync_each_batch=False with"
        if self.accumulation == 1:
            raise SpecError(f"{option} accumulation=1: there is only one micro-batch; give accumulation >= 2, "
                            "or leave it out")  # fmt: skip
        if self.zero < 2:
            raise SpecError(f"{option} zero={self.zero}: it applies to FSDP, and DDP always reduces after the last "
                            "micro-batch; give zero=2 or 3, or leave it out")  # fmt: skip
        if self.pp > 1:
            raise SpecError(f"{option} pp={self.pp}: a pipeline always reduces after its last micro-batch; leave it "
                            "out")  # fmt: skip
        if self.offload == "optimizer":
            raise SpecError(f"{option} offload='optimizer': that is DeepSpeed's offload, and DeepSpeed reduces after "
                            "each micro-batch; give offload='optimizer+parameters' (FSDP), or leave one "
                            "out")  # fmt: skip

    @property
    def expert_tp(self) -> int:
        """The number of ranks that divide each expert."""
        return stack_of(self).expert_tensor_parallel_size or self.tp

    @property
    def expert_stride(self) -> int:
        """The distance in ranks between neighbours in expert parallelism."""
        return self.expert_tp if stack_of(self).spreads_experts else self.tp * self.cp

    @property
    def fp8_recipe(self) -> str | None:
        """The recipe of fp8 matmuls: torchao's, or Transformer Engine's, which is an option of the stack."""
        return self.fp8 or stack_of(self).fp8_recipe

    def _check_fp8(self) -> None:
        option = f"fp8={self.fp8!r}"
        if self.precision not in ("bf16", "mixed-bf16"):
            raise SpecError(
                f"{option} with precision={self.precision!r}: fp8 matmuls are cast from bf16; give bf16 or "
                "mixed-bf16"
            )
        if not self.compile:
            raise SpecError(f"{option} with compile=False: without fused casts fp8 costs more than it saves; "
                            "give compile=True")  # fmt: skip
        if self.lora:
            raise SpecError(f"{option} with lora: torchao does not convert layers with adapters; give one of the two")
        if (rows := self.tokens // self.cp) % 16:
            raise SpecError(f"{option}: fp8 units need a multiple of 16 rows; micro_batch × seq_len / cp is {rows}")

    def _check_gathered_logits(self) -> None:
        if self.tp == 1:
            raise SpecError("loss_parallel=False with tp=1: the logits are not sharded; give tp >= 2, or leave it out")
        if self.kernels == "liger":
            raise SpecError("loss_parallel=False with kernels='liger', which never stores the logits; give one of them")

    def _check_muon(self) -> None:
        conflicts = [f"{name}={getattr(self, name)!r}" for name in ("zero", "tp", "ep", "offload", "lora")
               if getattr(self, name) != getattr(type(self), name)]  # fmt: skip
        if conflicts:
            raise SpecError(f"optimizer='muon' with {', '.join(conflicts)}: torch's Muon needs whole matrices on the "
                            "GPU; leave it out, or give adamw")  # fmt: skip

    def _check_imbalance(self) -> None:
        imbalance = self.expert_imbalance
        if isinstance(imbalance, bool) or not isinstance(imbalance, (int, float)) or not 1 <= imbalance <= self.ep:
            raise SpecError(f"expert_imbalance={imbalance!r} with ep={self.ep}: give the tokens of the busiest rank "
                            "divided by the mean, a number from 1 to ep")  # fmt: skip
        if imbalance > 1 and getattr(self.stack, "moe_expert_capacity_factor", None) is not None:
            raise SpecError(f"expert_imbalance={imbalance} with moe_expert_capacity_factor, which pads or drops the "
                            "tokens of each expert to the same number; leave one of them out")  # fmt: skip

    def _check_replicas(self) -> None:
        option = f"dp_replicate={self.dp_replicate} with dp={self.dp}"
        if self.dp % self.dp_replicate or self.dp == self.dp_replicate:
            raise SpecError(f"{option}: give a divisor of dp that leaves at least 2 ranks per copy")
        if not self.zero:
            raise SpecError(
                f"{option} and zero=0: nothing is sharded, so all ranks are copies; give zero >= 1, or leave it "
                "out"
            )
        if self.dp_shard % self.ep:
            raise SpecError(
                f"{option}: ep={self.ep} does not divide the {self.dp_shard} ranks of a copy; give a "
                "divisor"
            )
        if self.offload:
            raise SpecError(f"{option}: offloading engines shard states over all ranks; give one of the two")

    @property
    def dp_shard(self) -> int:
        """The number of data-parallel ranks over which ZeRO shards each replica: all, unless `dp_replicate` > 1."""
        return self.dp // self.dp_replicate

    def differences(self) -> dict[str, Any]:
        """Return the fields whose value differs from the default, or from the value that the stack would set."""
        values = self.values()
        stack_values = stack_of(self).sets(values)
        names = {*super().differences(), *(name for name, value in stack_values.items() if value != values[name])}
        return {name: value for name, value in values.items() if name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values, without `stack` if it is transformers."""
        data = super().to_dict()
        del data["stack"]
        return data if self.stack == TRANSFORMERS else {**data, "stack": stack_of(self).to_dict()}

    @property
    def compute_dtype(self) -> str:
        """The dtype of the matmuls, "fp32", "fp16" or "bf16": the part of `precision` after its hyphen."""
        return self.precision.rpartition("-")[2]

    @property
    def objective(self) -> Method:
        """The `Method` that describes the cost of `method` in a step."""
        return METHODS[self.method]

    @property
    def reference_model(self) -> Reference | None:
        """The source of the reference model's log-probabilities; None if the loss needs none."""
        if not self.objective.reference or (self.reference is None and self.objective.optional):
            return None
        return self.reference or ("adapter" if self.lora else "kept")

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch on one data-parallel rank: for pairs, two for each sample."""
        return self.micro_batch * self.objective.sequences

    @property
    def scored(self) -> int:
        """Tokens of a micro-batch for which the head computes logits; for "ppo" and "grpo", only the completions."""
        return self.sequences * (self.completion_len or self.seq_len)

    @property
    def update(self) -> Training:
        """The same run with next-token loss on the same sequences."""
        if self.method == "sft":
            return self
        return replace(self, method="sft", micro_batch=self.sequences, reference=None, teacher=None,
                       completion_len=None, mean_completion_len=None, num_labels=None)  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one data-parallel rank."""
        return self.sequences * self.seq_len

    @property
    def fp8_param_gather(self) -> bool:
        """Whether Transformer Engine's fp8 weights are the parameters, without a 16-bit copy."""
        return stack_of(self).fp8_param_gather

    @property
    def gathers_float8(self) -> bool:
        """Whether weights are all-gathered in fp8.

        FSDP2 does this over data-parallel ranks with one scale per tensor, unless the stack turns it off
        (torchtitan/components/quantization/float8.py). Megatron-LM's distributed optimizer does it for fp8 weights,
        except with mxfp8, whose weights are gathered in 16 bits through the gradient buffer
        (megatron/core/distributed/param_and_grad_buffer.py).
        """
        if self.fp8_param_gather:
            return self.fp8_recipe != "mxfp8"
        enabled = stack_of(self).enable_fsdp_float8_all_gather
        return self.fp8 == "tensorwise" and self.zero >= 2 and self.dp_shard > 1 and enabled

    @property
    def global_batch(self) -> int:
        """Sequences in one optimizer step over all ranks: sequences × accumulation × data-parallel ranks."""
        return self.sequences * self.accumulation * self.dp

    @property
    def world_size(self) -> int:
        """Devices: dp × tp × pp × cp (experts live on the data-parallel ranks)."""
        return self.dp * self.tp * self.pp * self.cp

    @classmethod
    def from_deepspeed(cls, config: Settings, **given: Any) -> Training:
        """Return the Training that DeepSpeed's config describes; `config` is a dict, JSON text or a file.

        `given` are fields that the config leaves open, such as seq_len, and dp if the batch sizes do not determine it.
        Raises SpecError for unknown keys, for another engine's config, and for an "auto" that `given` does not resolve.
        """
        from ..engines.readers import deepspeed_fields

        return cls(**deepspeed_fields(config, cls._named(given)))

    @classmethod
    def from_accelerate(cls, config: Settings, **given: Any) -> Training:
        """Return the Training that Accelerate's config describes; `config` is a dict, YAML text or a file.

        `given` and errors are as in `from_deepspeed`. With FSDP and several micro-batches, `sync_each_batch` becomes
        False, because Accelerator.accumulate reduces gradients only after the last one. If the script's
        GradientAccumulationPlugin changes that, which no key of the config can, give True. `reduce_dtype` becomes the
        16-bit dtype, in which Accelerate's mixed precision reduces.
        """
        from ..engines.readers import accelerate_fields

        return cls(**accelerate_fields(config, cls._named(given)))

    @classmethod
    def from_trainer(cls, arguments: Any, **given: Any) -> Training:
        """Return the Training that transformers' TrainingArguments (or their to_dict(), JSON text, or a file) describe.

        `given` are the fields that they leave open: seq_len, dp, attention, adapters. `sync_each_batch` is read from
        gradient_accumulation_kwargs in accelerator_config; without it, it is as in `from_accelerate`. Raises SpecError
        as `from_deepspeed` does, and NotAvailable if transformers, which checks the names, is missing.
        """
        from ..engines.trainer import trainer_fields

        return cls(**trainer_fields(arguments, cls._named(given)))

    @classmethod
    def from_torchtitan(cls, config: Settings, **given: Any) -> Training:
        """Return the Training that torchtitan's job config describes; `config` is a dict, TOML text or a file.

        `given` must have dp if the shard degree is -1 (all remaining ranks). Raises SpecError as `from_deepspeed` does.
        """
        from ..engines.torchtitan import torchtitan_fields

        return cls(**torchtitan_fields(config, cls._named(given)))

    @classmethod
    def _named(cls, given: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(given) - {f.name for f in fields(cls)}):
            raise SpecError(f"Training has no field {', '.join(unknown)}")
        return given

    def to_deepspeed(self) -> dict[str, Any]:
        """Return the config for `deepspeed.initialize`; see `engines.configs.deepspeed_config`."""
        from ..engines.configs import deepspeed_config

        return deepspeed_config(self)

    def to_accelerate(self) -> dict[str, Any]:
        """Return the config for `accelerate launch --config_file`; see `engines.configs.accelerate_config`."""
        from ..engines.configs import accelerate_config

        return accelerate_config(self)

    def to_fsdp(self) -> dict[str, Any]:
        """Return the keyword arguments of torch's `fully_shard`; see `engines.configs.fsdp_arguments`."""
        from ..engines.configs import fsdp_arguments

        return fsdp_arguments(self)


@dataclass(frozen=True, repr=False)
class Inference(ChoiceSpec):
    """One generation: `batch` prompts of `prompt_len` tokens, each continued by `new_tokens` tokens.

    `weights` and `kv` are the dtypes of the weights and of the KV cache; `tp` is the number of tensor-parallel ranks.
    Raises SpecError for a value that is not allowed.
    """

    batch: int = 1
    prompt_len: int = 1024
    new_tokens: int = 256
    weights: Weights = "bf16"
    kv: KVDtype = "bf16"
    attention: Attention = "sdpa"
    tp: int = 1

    def __post_init__(self, unset: frozenset[str]) -> None:
        super().__post_init__(unset)
        self._check_counts("batch", "prompt_len", "new_tokens", "tp")
        self._check_choices(weights=WEIGHTS, kv=KV_DTYPES, attention=ATTENTIONS)

    @property
    def seq_len(self) -> int:
        """Tokens of a finished sequence, which is the length of the KV cache."""
        return self.prompt_len + self.new_tokens

    @property
    def world_size(self) -> int:
        """Devices: the tensor-parallel ranks."""
        return self.tp


Run = Training | Inference


def stack_of(run: Run) -> StackOptions:
    """Return the options of the stack that runs `run`, with the facts about its code. Generation always runs
    transformers, which has no options."""
    return options_of(run.stack if isinstance(run, Training) else TRANSFORMERS)


def run_from_dict(kind: str, data: dict[str, Any]) -> Run:
    """Return the Training or Inference (`kind`: "training" or "inference") with the `data` of its `to_dict()`. Raises
    SpecError for an unknown kind or field."""
    cls = {"training": Training, "inference": Inference}.get(kind)
    if cls is None:
        raise SpecError(f"kind of run {kind!r} is not one of training, inference")
    names = {f.name for f in fields(cls)}
    if unknown := sorted(set(data) - names):
        raise SpecError(f"{cls.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(names))}")
    values = dict(data)
    if isinstance(values.get("lora"), dict):
        try:
            values["lora"] = LoRA(**{**values["lora"], "targets": tuple(values["lora"].get("targets", ()))})
        except TypeError as error:
            raise SpecError(f"lora={data['lora']!r}: {error}") from None
    if isinstance(values.get("stack"), dict):
        values["stack"] = stack_from_dict(values["stack"])
    return cls(**values)
