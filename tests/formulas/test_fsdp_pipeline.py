"""FSDP2 inside torch's pipeline stages, on real ranks: what a step sends and holds, beside the formulas."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import llmlab as lab
from llmlab.course.architectures.llama import Llama
from llmlab.course.experiments.job import tiny_llama
from llmlab.course.techniques.pipeline import Stage
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.states import states
from llmlab.formulas.time.distributed import step
from llmlab.hardware.links import cluster
from llmlab.ranks.launch import launch

PP, DP, MICRO_BATCHES, T = 2, 2, 4, 16
LLAMA = "meta-llama/Llama-3.1-8B"


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def one_step(reshard: bool) -> dict[str, int | float | None]:
    """Return the bytes that a stage's all-gathers put out and its reduce-scatters take in, over a step of 1F1B, those
    of its parameters and kept gradients, and the loss."""
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    stage, copy = mesh.get_coordinate()
    torch.manual_seed(0)
    module = Stage(Llama(tiny_llama()), stage, PP)
    whole = sum(p.nbytes for p in module.parameters())
    outside = whole - sum(p.nbytes for p in module.layers.parameters())
    for block in module.layers:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh["dp"])
    found: Counter[str] = Counter()
    names = ["all_gather_single", "reduce_scatter_single"]  # the names of torch 2.13
    if not hasattr(dist, names[0]):
        names = ["all_gather_into_tensor", "reduce_scatter_tensor"]
    gather, reduce = (getattr(dist, name) for name in names)

    def gathered(*args, **kwargs):
        found["gathered"] += max(given.nbytes for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor))
        return gather(*args, **kwargs)

    def reduced(*args, **kwargs):
        found["reduced"] += max(given.nbytes for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor))
        return reduce(*args, **kwargs)

    for name, counting in zip(names, (gathered, reduced), strict=True):
        setattr(dist, name, counting)
    piped = pipelining.PipelineStage(module, stage, PP, torch.device("cpu"), group=mesh.get_group("pp"))
    plan = pipelining.Schedule1F1B(piped, MICRO_BATCHES, loss_fn=next_token_loss)
    ids = torch.randint(384, (DP, 2 * MICRO_BATCHES, T), generator=torch.Generator().manual_seed(1))[copy]
    losses: list[torch.Tensor] = []
    last = stage == PP - 1
    for _ in range(2):  # the first also runs each stage once to learn its shapes
        found.clear()
        module.zero_grad()
        plan.step(*([ids] if stage == 0 else []), target=ids if last else None, losses=losses if last else None)
    for name, own in zip(names, (gather, reduce), strict=True):
        setattr(dist, name, own)
    grads = sum(p.grad.to_local().nbytes for p in module.parameters())
    loss = sum(each.item() for each in losses) / MICRO_BATCHES if last else None
    return {**found, "whole": whole, "outside": outside, "kept": grads, "loss": loss}


def both(reshard_first: bool) -> list[dict[str, int | float | None]]:
    return [one_step(reshard) for reshard in (reshard_first, not reshard_first)]


@pytest.fixture(scope="module")
def ranks():
    return launch(both, PP * DP, False, patience=30)


def test_a_stage_reduces_its_gradients_once_and_gathers_as_the_formula_says(ranks):
    """zero=2 gathers all once a step. zero=3 gathers a block m + 1 times: forward frees it, but no backward before the
    last does, so the forward after a backward finds it whole."""
    for rank in ranks:
        kept, freed = rank
        for found in rank:
            assert found["reduced"] == found["whole"]
            assert found["kept"] == found["whole"] / DP
        assert kept["gathered"] == kept["whole"]
        blocks = freed["whole"] - freed["outside"]
        assert freed["gathered"] == (MICRO_BATCHES + 1) * blocks + freed["outside"]


def test_losses_are_one_process_s(ranks):
    torch.manual_seed(0)
    model = Llama(tiny_llama())
    ids = torch.randint(384, (DP, 2 * MICRO_BATCHES, T), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        alone = [next_token_loss(model(each), each).item() for each in ids]
    for copy in range(DP):
        for found in ranks[DP * (PP - 1) + copy]:
            assert found["loss"] == pytest.approx(alone[copy], abs=1e-5)


def test_what_sharding_a_stage_sends():
    """zero=2 sends what zero=1 does, once a step; zero=3 gathers blocks m + 1 times, and reduces once."""
    run = lab.Training(dp=8, pp=4, accumulation=8, precision="mixed-bf16", seq_len=2048)
    nodes = cluster("H100")
    sent = {zero: step(LLAMA, replace(run, zero=zero), "H100", nodes, overlap=()).data_sent for zero in (1, 2, 3)}
    assert sent[2] == pytest.approx(sent[1])
    spec = lab.model(LLAMA)  # the fullest stage has the embedding or the head, which are gathered once
    outside = spec.vocab * spec.hidden
    blocks = (spec.parameters - 2 * outside) / 4
    assert sent[3] / sent[1] == pytest.approx((10 * blocks + 2 * outside) / (2 * blocks + 2 * outside), rel=0.05)


def test_gradients_of_a_sharded_stage_are_whole_until_its_last_micro_batch():
    """4 bytes each, as they are reduced: more than stage 1's half ones. Between steps only shards are there."""
    spec = lab.model(LLAMA)
    run = lab.Training(dp=8, pp=4, accumulation=8, precision="mixed-bf16", seq_len=2048, zero=2)
    one = replace(run, zero=1)
    for stage in range(4):
        moments = {moment.name: moment.parts for moment in training_moments(spec, run, None, stage=stage)}
        parameters = states(spec, one, stage).weights / 2
        assert moments["the first block of backward"]["gradients"] >= 4 * parameters * 0.999
        assert moments["the update"]["gradients"] == pytest.approx(4 * parameters / 8, rel=0.01)
        sizes = states(spec, run, stage)
        assert sizes.units.resident == pytest.approx(2 * parameters, rel=0.01)  # all of the stage's, and of no other
