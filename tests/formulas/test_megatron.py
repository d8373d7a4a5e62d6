"""Megatron-LM's block and step, held to the paper's formula, to its schedules and to its own golden values."""

from dataclasses import replace

import megatron_script
import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.formulas.memory.activations import korthikanti_block
from llmlab.formulas.memory.megatron import BLOCK, MegatronMemory, block_bytes, layers_in_flight
from llmlab.formulas.memory.share import share_of
from llmlab.specs.megatron import Megatron

DEFAULT = Megatron()
RUN = megatron_script.TE
PP4 = lab.Training(pp=4, accumulation=8)


def memory(run: megatron_script.Run, stage: int = 0, **options: object) -> MegatronMemory:
    share = share_of(megatron_script.spec_of(run), megatron_script.training_of(run), lab.gpu("A100-80GB"), stage=stage)
    return MegatronMemory(share, Megatron(**{"virtual_pipeline": run.chunks, **options}))


def at(memory: MegatronMemory, name: str) -> dict[str, int]:
    return next(moment.parts for moment in memory.moments() if moment.name == name)


# ---- the block


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_block_is_the_papers(tp, sequence_parallel):
    run = replace(RUN, tp=tp, sequence_parallel=sequence_parallel and tp > 1)
    share = memory(run).share
    s, b, h, a = run.seq, run.micro_batch, run.hidden, run.heads
    paper = korthikanti_block(s, b, h, a, tp, run.sequence_parallel)
    # The paper leaves out what norms keep of a row: its mean and 1/std in fp32.
    statistics = 2 * 8 * s * b // share.sequence_ranks
    assert block_bytes(share, DEFAULT) == paper + statistics


def test_recomputing_core_attention_leaves_34sbh():
    run = replace(RUN, tp=2, sequence_parallel=True)
    share = memory(run).share
    statistics = 2 * 8 * run.seq * run.micro_batch // 2
    assert block_bytes(share, DEFAULT, ("core_attn",)) == 34 * run.seq * run.micro_batch * run.hidden / 2 + statistics


def test_every_tensor_of_the_block_names_its_file():
    assert all(".py" in kept.source for kept in BLOCK)


def test_own_attention_keeps_the_product_beside_copied_queries():
    run = replace(RUN, groups=2, attention="flash")
    share = memory(run).share
    own = block_bytes(share, Megatron(transformer_engine=False)) - block_bytes(share, DEFAULT)
    assert own == 2 * share.tokens * run.hidden  # the queries, which Transformer Engine's copies replace


# ---- schedules


def test_one_f_one_b_keeps_a_micro_batch_for_each_stage_to_come():
    assert [layers_in_flight(PP4, stage, 8) for stage in range(4)] == [32, 24, 16, 8]


def test_interleaved_stages_keep_more_and_the_last_nearly_as_much_as_the_first():
    assert [layers_in_flight(PP4, stage, 8, chunks=8) for stage in range(4)] == [35, 33, 31, 29]


def test_no_more_micro_batches_than_there_are():
    assert layers_in_flight(lab.Training(pp=4, accumulation=1), 0, 8, chunks=8) == 8


def test_a_stage_holds_the_inputs_of_its_chunks_and_their_gradients_after_the_step():
    """What the last stage holds beside its share: of 8 chunks, 2 × 8 tensors of sequence × hidden; the first stage's
    first chunk receives nothing."""
    run = megatron_script.RUNS["7B, pp 4, 8 virtual stages, H100"]
    tensor = 2 * run.seq * run.hidden
    assert [at(memory(run, stage), "the update")["other"] // tensor for stage in (0, 3)] == [14, 16]


# ---- states


@pytest.mark.parametrize(("given", "bytes_"), [
    ({}, 18), ({"fp16": True}, 20), ({"distributed_optimizer": True}, 6 + 12 / 8),
])  # fmt: skip
def test_bytes_of_a_parameter_in_the_update(given, bytes_):
    found = memory(replace(RUN, **given))
    parts = at(found, "the update")
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert states == pytest.approx(bytes_ * found.parameters, abs=16)


def test_the_vocabulary_is_padded_for_each_rank():
    assert memory(replace(RUN, tp=4)).vocab == 50688 // 4


# ---- recomputation


def test_full_recomputation_keeps_an_input_of_every_group_of_layers():
    found = memory(RUN, recompute="full", recompute_num_layers=5)
    tensor = 2 * RUN.seq * RUN.micro_batch * RUN.hidden
    assert found.activations == 3 * tensor  # of 5, 5 and 2 layers
    assert found.recomputed == 5 * block_bytes(found.share, DEFAULT) - tensor


def test_block_recomputation_keeps_the_other_layers_whole():
    found = memory(RUN, recompute="full", recompute_method="block", recompute_num_layers=5)
    tensor = 2 * RUN.seq * RUN.micro_batch * RUN.hidden
    assert found.activations == 5 * tensor + 7 * block_bytes(found.share, DEFAULT)


def test_a_method_is_for_full_recomputation():
    with pytest.raises(SpecError, match="recompute_method='block' is for recompute='full'"):
        Megatron(recompute="selective", recompute_method="block")


def test_an_unknown_option_names_what_there_is():
    with pytest.raises(SpecError, match="recompute='some' is not one of None, selective, full"):
        Megatron(recompute="some")


# ---- golden values


@pytest.mark.parametrize("name", megatron_script.RUNS)
def test_estimates_are_the_golden_values(name):
    held, peak = megatron_script.estimated(name)
    real_held, real_peak = megatron_script.published(name)
    assert peak == pytest.approx(real_peak, rel=0.03)
    assert held == pytest.approx(real_held, rel=0.02)
