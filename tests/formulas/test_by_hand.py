"""What `lab.simulate` has no engine for, beside the formula: the book's own techniques and one stage of a pipeline, run
as programs on the simulated card."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab.course.architectures.llama import Llama
from llmlab.course.techniques import tensor_parallel
from llmlab.course.techniques.context_parallel import ring_attention
from llmlab.course.techniques.pipeline_schedules import schedule
from llmlab.formulas.memory.activations import block_saved, per_device
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.share import share_of

CARD = "H100-80GB"
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
         "num_hidden_layers": 4, "intermediate_size": 1408, "vocab_size": 8000,
         "max_position_embeddings": 1024}  # fmt: skip
RUN = lab.Training(micro_batch=2, seq_len=1024, precision="bf16")


def kept(run: lab.Training, layers: int) -> int:
    """Bytes that are kept for backward, as asked of the allocator, by chapter 14's own code on rank 0."""
    with lab.simulator(CARD, world_size=run.world_size):
        dist.init_process_group("nccl")
        model = Llama(lab.model({**LLAMA, "num_hidden_layers": layers})).to("cuda", torch.bfloat16)
        if run.tp > 1:
            tensor_parallel.shard(model, run.sequence_parallel)
        if run.cp > 1:
            for block in model.layers:
                block.self_attn.attend = lambda q, k, v, *_: ring_attention(q, k, v, tile=128)
        ids = torch.randint(LLAMA["vocab_size"], (run.micro_batch, run.seq_len // run.cp), device="cuda")
        asked = lambda: torch.cuda.memory_stats()["requested_bytes.all.current"]  # noqa: E731
        model(ids)  # cuBLAS has its workspace
        before = asked()
        logits = model(ids)
        return asked() - before if logits.requires_grad else 0


@pytest.mark.parametrize("cut", [{"tp": 4}, {"tp": 4, "sequence_parallel": True}, {"cp": 4}], ids=str)
def test_chapter_14s_own_parallelism_keeps_what_the_formula_says_to_the_byte(cut):
    """With sequence parallelism the inputs of the two pairs are whole on every rank: they are kept as gathered."""
    run = replace(RUN, **cut)
    estimated = per_device(block_saved(share_of(lab.model(LLAMA), run, lab.gpu(CARD))), run)
    assert kept(run, 3) - kept(run, 1) == pytest.approx(2 * sum(estimated.values()), abs=64)  # seeds, offsets
    inputs = 2 * 2 * RUN.tokens * LLAMA["hidden_size"]
    assert estimated["linear inputs"] == inputs // run.cp


def stage_peak(run: lab.Training, stage: int) -> int:
    """The peak of one rank of transformers' Llama that is trained by a schedule of chapter 15, the other ranks not
    being there."""
    first, last = stage == 0, stage == run.pp - 1
    shape = {**LLAMA, "num_hidden_layers": LLAMA["num_hidden_layers"] // run.pp}
    with lab.simulator(CARD) as sim:
        with torch.device("meta"):
            config = AutoConfig.for_model(**shape)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        body = model.model
        if not first:
            body.embed_tokens = None
        if not last:
            body.norm = model.lm_head = None
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(LLAMA["vocab_size"], (run.micro_batch, run.seq_len), device="cuda")
        positions = torch.arange(run.seq_len, device="cuda")[None]
        passing = {"device": "cuda", "dtype": torch.bfloat16}
        per_stage = shape["num_hidden_layers"] // run.virtual_stages

        def forward(number):
            begins, ends = number == 0, number == run.pp * run.virtual_stages - 1
            received = None if begins else torch.randn(*ids.shape, LLAMA["hidden_size"], requires_grad=True, **passing)
            x = body.embed_tokens(ids) if received is None else received
            turned = body.rotary_emb(x, positions)
            own = number // run.pp * per_stage
            for layer in body.layers[own : own + per_stage]:
                x = layer(x, position_embeddings=turned)
            if not ends:
                return received, x
            logits = model.lm_head(body.norm(x))  # the usual loop's output object keeps them
            return logits, model.loss_function(logits, ids, LLAMA["vocab_size"])

        def backward(pair):
            out = pair[1]
            out.backward(torch.randn_like(out) if out.dim() else None)

        name = run.schedule if run.virtual_stages == 1 else "interleaved"
        plan = schedule(name, run.pp, run.accumulation, run.virtual_stages)[stage]
        for _ in range(2):
            sim.reset_peak()
            under_way = {}
            for op in plan:
                if op.kind == "F":
                    under_way[op.stage, op.micro_batch] = forward(op.stage)
                else:
                    backward(under_way.pop((op.stage, op.micro_batch)))
            optimizer.step()
            optimizer.zero_grad()
        return sim.peak_allocated


INTERLEAVED = {"pp": 2, "accumulation": 6, "virtual_stages": 2}


@pytest.mark.parametrize(("stage", "cut"), [
    (0, {}), (1, {}), (3, {}), (0, {"schedule": "gpipe"}), (3, {"schedule": "gpipe"}), (0, INTERLEAVED),
    (1, INTERLEAVED),
])  # fmt: skip
def test_a_pipelines_stage_holds_what_its_schedule_has_in_flight(stage, cut):
    run = replace(RUN, **{"pp": 4, "accumulation": 6, **cut})
    moments = training_moments(lab.model(LLAMA), run, lab.gpu(CARD), stage=stage)
    assert max(moment.total for moment in moments) == pytest.approx(stage_peak(run, stage), rel=0.03)


def test_expert_parallelism_leaves_a_rank_its_experts_and_as_many_tokens():
    """Where the router is fair, rank 0 of ep=2 is a rank of a model with half the experts."""
    half = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    run = replace(RUN, dp=4, precision="bf16")
    guess = lab.estimate({**half, "num_local_experts": 8}, replace(run, ep=2), CARD)
    report = lab.simulate(half, run, CARD)
    assert guess.peak_allocated == pytest.approx(report.peak_allocated, rel=0.02)
    assert guess.phases["optimizer"] == pytest.approx(report.phases["optimizer"], rel=0.02)
