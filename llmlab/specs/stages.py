"""Which layers a pipeline stage has: the same for estimates, simulations and the pipeline from scratch.

Equal stages where their number divides the layers, as engines do by default. Else the embedding and the head count as a
layer each, and the first stages take what is left over: Llama 3 405B (arXiv 2407.21783, section 3.3.2) leaves one layer
out of the first and one out of the last stage; Megatron-Core has the flags account_for_embedding_in_pipeline_split and
account_for_loss_in_pipeline_split for it, and TorchTitan's generate_llm_fqn_per_model_part does it always.
"""

from __future__ import annotations

from functools import lru_cache

from ..base.errors import SpecError


@lru_cache(1024)  # an estimate asks for the same a dozen times
def stage_layers(layers: int, stages: int, name: str = "the model") -> tuple[int, ...]:
    """Return how many of `layers` each of `stages` has. Raises SpecError where one would have none.

    >>> stage_layers(32, 4)
    (8, 8, 8, 8)
    >>> stage_layers(126, 8)     # 128 with embedding and head
    (15, 16, 16, 16, 16, 16, 16, 15)
    """
    if stages > layers or min(counts := _counts(layers, stages)) < 1:  # a huge number is not listed first
        given = f"pp={stages} leaves a stage without any of {name}'s {layers} layers"
        raise SpecError(f"{given}; give pp={(layers + 2) // 2} at most, or pp={layers}")
    return counts


def _counts(layers: int, stages: int) -> tuple[int, ...]:
    if layers % stages == 0:
        return (layers // stages,) * stages
    share, over = divmod(layers + 2, stages)
    counts = [share + (stage < over) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)
