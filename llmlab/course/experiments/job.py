"""The job of an experiment, which is a Training by an engine for some steps, and the two small models."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...base.errors import SpecError, check_counts
from ...specs.model import ModelSpec, model
from ...specs.run import Training

# 78,144 parameters. FSDP2 cuts the first dimension of each parameter, so 2 and 4 divide all of them. The parameters of
# each unit are a multiple of 2, 3 and 4.
TINY_GPT: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": 384, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.05,
}  # fmt: skip

# 2 and 4 divide the heads, key heads, MLP width, vocabulary and layers. The head is untied, so that the first and the
# last stage share nothing.
TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "initializer_range": 0.05,
}  # fmt: skip
SEQ_LEN = 64  # the longest sequence of both

# The fields of a Training that each experiment uses, in addition to micro_batch and seq_len.
FIELDS = {
    "data_parallel": ("dp",),
    "zero": ("dp", "zero"),
    "tensor_parallel": ("tp", "sequence_parallel"),
    "pipeline": ("pp", "accumulation"),
    "three_d": ("dp", "tp", "pp", "accumulation"),
    "offload": ("dp", "zero", "accumulation", "precision", "offload"),
    "cluster": ("dp", "zero", "accumulation"),
}


@dataclass(frozen=True)
class Job:
    """`steps` optimizer steps of `run` by `engine`. The `seed` determines weights and batches.

    `experiment` is a name of `python -m llmlab.course.experiments`. Raises SpecError for impossible values, and for
    fields of `run` that the experiment would ignore.
    """

    experiment: str
    run: Training
    engine: str = "scratch"
    steps: int = 20
    seed: int = 0
    method: str = "buckets"  # of data_parallel from scratch: naive, hooks, buckets
    schedule: str = "1f1b"  # of a pipeline
    virtual_stages: int = 1  # of a pipeline, per rank

    def __post_init__(self) -> None:
        check_counts(steps=self.steps)
        check_seed(self.seed)
        if not 2 <= self.run.seq_len <= SEQ_LEN:
            raise SpecError(f"seq_len={self.run.seq_len!r} is outside 2 <= seq_len <= {SEQ_LEN}")
        if self.experiment not in FIELDS:
            raise SpecError(f"experiment={self.experiment!r} is not one of {', '.join(FIELDS)}")
        read = ("micro_batch", "seq_len", *FIELDS[self.experiment])
        for field in fields(self.run):
            value = getattr(self.run, field.name)
            if field.name not in read and value != field.default:
                raise SpecError(f"{self.experiment} reads {', '.join(read)} of a Training; drop {field.name}={value!r}")


def check_seed(seed: int) -> None:
    """Raise SpecError unless `batch_seed` can turn the seed into one for torch's generators."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise SpecError(f"seed={seed!r} is not a whole number from 0 to {2**31 - 1}")


def tiny_gpt() -> ModelSpec:
    return model(TINY_GPT)


def tiny_llama() -> ModelSpec:
    return model(TINY_LLAMA)
