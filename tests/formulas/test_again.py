"""What backward computes again, of some blocks or of parts of all: in products, attention, bytes, host and messages."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab import Training
from llmlab.formulas.again import attentions_again, recomputed_blocks, wholly_recomputed_blocks
from llmlab.formulas.time.distributed import step
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.flops import flops
from llmlab.formulas.time.host import started
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import attention_seconds
from llmlab.hardware.links import cluster

LLAMA = lab.model("meta-llama/Llama-3.1-8B")  # 32 blocks
RUN = Training(seq_len=8192, attention="flash", tp=2, sequence_parallel=True, stack=lab.Megatron())


def blocks(number, method="block", **settings):
    chunks = settings.pop("virtual_pipeline", 1)
    stack = lab.Megatron(recompute="full", recompute_method=method, recompute_num_layers=number,
                         virtual_pipeline=chunks)  # fmt: skip
    return replace(RUN, checkpointing="full", stack=stack, virtual_stages=chunks, **settings)


def seconds(run):
    return step(LLAMA, run, "H100", cluster("H100")).seconds


@pytest.mark.parametrize(
    ("run", "expected"),
    [(RUN, 0), (blocks(5), 5), (blocks(32), 32), (blocks(40), 32), (blocks(4, "uniform"), 32),
     (blocks(3, pp=2, accumulation=2), 6), (blocks(3, pp=2, accumulation=2, virtual_pipeline=4), 24),
     (blocks(5, pp=2, accumulation=2, virtual_pipeline=4), 32), (replace(RUN, checkpointing="full"), 32),
     (Training(dp=8, stack="torchtitan:ac=selective_layers,every=3"), 10)],
)  # fmt: skip
def test_so_many_blocks_are_computed_again(run, expected):
    """megatron-core's transformer_block.py: "block" counts through the layers of a virtual stage; torchtitan's
    activation_checkpoint.py through those of a rank."""
    assert recomputed_blocks(LLAMA, run) == wholly_recomputed_blocks(LLAMA, run) == expected
    assert attentions_again(LLAMA, run, fused=True) == expected


def test_all_that_a_block_takes_again_is_of_those_blocks_alone():
    none, whole = RUN, blocks(32)
    one = flops(LLAMA, whole).recomputed
    block = 2 * RUN.tokens * sum(each.inputs * each.outputs * each.count for each in LLAMA.block_linears)
    scores = 4 * 32 * 32 * 128 * 8192**2
    assert one == block + scores  # all of a block: Megatron-LM's checkpoint does not stop before its last product
    rates = kernels("H100")
    for many in (1, 5, 16):
        run, share = blocks(many), many / 32

        def between(what, share=share):
            return pytest.approx((1 - share) * what(none) + share * what(whole))

        assert flops(LLAMA, run).recomputed == share * one
        assert attention_seconds(LLAMA, run, rates) == between(lambda each: attention_seconds(LLAMA, each, rates))
        assert moved(LLAMA, run).blocks == between(lambda each: moved(LLAMA, each).blocks)
        assert started(LLAMA, run).kernels_back == between(lambda each: started(LLAMA, each).kernels_back)
        sent = [step(LLAMA, each, "H100", cluster("H100")).tensor for each in (none, run, whole)]
        assert sent[1] == pytest.approx((1 - share) * sent[0] + share * sent[2])
        assert seconds(run) == between(seconds)


def test_layers_that_keep_one_input_together_take_as_long_as_one_by_one():
    assert seconds(blocks(4, "uniform")) == seconds(blocks(1, "uniform")) == seconds(blocks(32)) > 1.1 * seconds(RUN)


def test_megatron_computes_the_modules_again_that_it_names():
    """The MLP whole, its last product too, and what is sent for it; attention by whatever kernel (attention.py,
    _checkpointed_attention_forward); and nothing else."""
    given = {"recompute": "selective", "recompute_modules": ("mlp",)}
    mlp, core = (replace(RUN, checkpointing="selective", stack=lab.Megatron(**{**given, "recompute_modules": modules}))
                 for modules in (("mlp",), ("core_attn",)))  # fmt: skip
    assert flops(LLAMA, mlp).recomputed == 2 * RUN.tokens * 32 * 3 * 4096 * 14336
    assert flops(LLAMA, core).recomputed == flops(LLAMA, RUN).by_part["scores"] * 2 // 7  # of 2 products and 5
    sent, again = (step(LLAMA, each, "H100", cluster("H100")) for each in (RUN, mlp))
    whole = step(LLAMA, blocks(32), "H100", cluster("H100"))
    assert again.tensor - sent.tensor == pytest.approx((whole.tensor - sent.tensor) / 2)
    assert step(LLAMA, core, "H100", cluster("H100")).tensor == sent.tensor
    assert seconds(RUN) < min(seconds(mlp), seconds(core)) < seconds(blocks(32))


def test_torchtitans_every_second_block_takes_half_of_what_all_do():
    """Attention too, which "selective_op" keeps."""
    none, half, whole = (Training(seq_len=8192, dp=8, attention="flash", stack=f"torchtitan:ac={ac}")
                         for ac in ("none", "selective_layers", "full"))  # fmt: skip
    for what in (lambda run: moved(LLAMA, run).blocks, lambda run: attention_seconds(LLAMA, run, kernels("H100"))):
        assert what(half) == pytest.approx((what(none) + what(whole)) / 2)
