"""The number of layers of each pipeline stage, for estimates, simulations and the pipeline from scratch.

If the number of stages divides the layers, all stages are equal, as in engines by default. Otherwise the embedding and
the head count as one layer each, and the first stages get the remaining layers. Llama 3 405B (arXiv 2407.21783, section
3.3.2) has one layer less in the first and in the last stage; Megatron-Core has the flags
account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split for it. torchtitan's
generate_llm_fqn_per_model_part always does it (distributed/pipeline_parallel.py), also for the virtual stages of an
interleaved schedule.
"""

from __future__ import annotations

from functools import lru_cache

from ..base.errors import SpecError
from .model import ModelSpec
from .run import Training, stack_of


@lru_cache(1024)  # an estimate calls it a dozen times with the same arguments
def stage_layers(layers: int, stages: int, name: str = "the model", count_ends: bool = False) -> tuple[int, ...]:
    """Return the number of layers of each stage. With `count_ends`, the embedding and the head count as layers even if
    the stages could be equal. Raises SpecError if a stage would have no layer.

    >>> stage_layers(32, 4)
    (8, 8, 8, 8)
    >>> stage_layers(126, 8)     # 128 with embedding and head
    (15, 16, 16, 16, 16, 16, 16, 15)
    """
    if stages > layers or min(counts := _counts(layers, stages, count_ends)) < 1:  # the first test avoids a huge list
        problem = f"pp={stages} leaves a stage of {name} without any of its {layers} layers"
        raise SpecError(f"{problem}; give pp={(layers + 2) // 2} at most, or pp={layers}")
    return counts


def chunks_of(spec: ModelSpec, run: Training, stage: int) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage on a rank of pipeline stage `stage`, in order.

    >>> from llmlab.specs.model import model
    >>> run = Training(pp=4, dp=2, accumulation=4, virtual_stages=2, stack="torchtitan")
    >>> chunks_of(model("meta-llama/Llama-3.1-8B"), run, 3)
    (4, 3)
    """
    if not stack_of(run).counts_embedding_and_head_as_layers or run.pp == 1:
        return (layers_of(spec, run)[stage] // run.virtual_stages,) * run.virtual_stages
    return _counts(spec.layers, run.pp * run.virtual_stages, count_ends=True)[stage :: run.pp]


def layers_of(spec: ModelSpec, run: Training) -> tuple[int, ...]:
    """Return the number of layers on each rank of the pipeline of `run`, summed over its virtual stages. Raises
    SpecError as `stage_layers` does.

    >>> from llmlab.specs.model import model
    >>> layers_of(model("meta-llama/Llama-3.1-8B"), Training(pp=4, dp=2, accumulation=4, stack="torchtitan"))
    (8, 9, 8, 7)
    """
    stack = stack_of(run)
    if counts := stack.layers_of(spec, run.pp):
        if min(counts[:-2], default=1) < 1:  # the last two may have only the head and the loss
            raise SpecError(f"pp={run.pp} leaves a stage of {spec.name} without any of its {spec.layers} layers, "
                            f"because {stack.name} splits them by their cost; give a smaller pp")  # fmt: skip
        return counts
    if not stack.counts_embedding_and_head_as_layers or run.pp == 1:
        return stage_layers(spec.layers, run.pp, spec.name)
    counts = tuple(sum(chunks_of(spec, run, rank)) for rank in range(run.pp))
    return counts if min(counts) > 0 else stage_layers(spec.layers, run.pp, spec.name, count_ends=True)  # raises


def _counts(layers: int, stages: int, count_ends: bool) -> tuple[int, ...]:
    if layers % stages == 0 and not count_ends:
        return (layers // stages,) * stages
    share, remainder = divmod(layers + 2, stages)
    counts = [share + (stage < remainder) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)
