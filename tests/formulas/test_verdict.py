"""Whether a run fits, by the formula: held to steps that others ran, and to those that ran out of memory."""

from collections import Counter
from dataclasses import replace

import llmlab as lab
from llmlab.archive import records
from llmlab.base.units import GiB
from llmlab.formulas import verdict as kinds
from llmlab.formulas.memory.moments import Moment
from llmlab.formulas.report import assessed, fullest
from llmlab.formulas.verdict import MEGATRON, MEGATRON_EXPANDABLE, OTHER, kind, verdict

H100 = replace(lab.gpu("H100-80GB"), memory=95 * GiB)  # the H100 of TorchTitan's runs shows 95.0 GiB
QV = lab.LoRA(rank=8, targets=("q_proj", "v_proj"))
TITAN = {"seq_len": 4096, "precision": "mixed-bf16", "checkpointing": "full", "zero": 3}
LITGPT = {"seq_len": 1304, "precision": "bf16", "lora": QV}  # on Alpaca, its longest sample first


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> dict:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": vocab,
            "n_positions": 2048}  # fmt: skip


def llama(layers: int, hidden: int, heads: int, intermediate: int, vocab: int) -> dict:
    return {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "intermediate_size": intermediate, "vocab_size": vocab, "max_position_embeddings": 2048,
            "tie_word_embeddings": False}  # fmt: skip


# Whether it ran, the card, the model, the run; what is not among a run's settings (a chunked loss) is not here.
PUBLISHED = [
    # pytorch/torchtune, README: full fine-tuning; LoRA, compiled
    (True, "A100-80GB", "Llama-3.2-3B", lab.Training(2, 4096, "bf16")),
    (True, "A100-80GB", "Llama-2-7b", lab.Training(2, 512, "bf16", "adamw-8bit", "full")),
    (True, "RTX-4090", "Llama-3.1-8B", lab.Training(2, 2048, "bf16", checkpointing="full", lora=QV, compile=True)),
    # pytorch/ao, quantized training: a model of its own, and a loss that is compiled with it
    (True, "RTX-4090", llama(24, 1536, 24, 6144, 32_000),
     lab.Training(32, 2048, "bf16", "adamw", "full", "flash", compile=True, kernels="fused-loss")),
    # Lightning-AI/litgpt, tutorials/resource-tables.md
    (True, "A100-40GB", "Llama-2-7b", lab.Training(1, **LITGPT)),
    (True, "A100-40GB", "Llama-2-7b", lab.Training(2, **LITGPT)),
    (False, "A100-40GB", "Llama-2-7b", lab.Training(4, **LITGPT)),
    (False, "A100-40GB", "Llama-2-13b", lab.Training(2, **LITGPT)),
    (True, "A100-40GB", "Llama-2-7b", lab.Training(2, zero=3, dp=2, **LITGPT)),
    (True, "A100-40GB", "Llama-2-13b", lab.Training(1, **LITGPT, quantization="nf4")),
    # pytorch/torchtitan, FSDP2 and tensor parallelism
    (True, H100, "Qwen3-32B", lab.Training(2, dp=8, **TITAN)),
    (True, H100, "Qwen3-32B", lab.Training(4, dp=16, **TITAN)),
    (False, H100, "Qwen3-32B", lab.Training(8, dp=16, **TITAN)),
    (True, H100, "Qwen3-32B", lab.Training(16, dp=8, tp=4, sequence_parallel=True, **TITAN)),
    (True, H100, "Qwen3-32B", lab.Training(32, dp=4, tp=8, sequence_parallel=True, **TITAN)),
    (False, H100, "Qwen3-32B", lab.Training(32, dp=8, tp=4, sequence_parallel=True, **TITAN)),
    # bigscience, chronicles of the 176B and 1.3B models: Megatron-DeepSpeed
    (False, "A100-80GB", gpt(72, 14336, 64, 250_880),
     lab.Training(1, 2048, "mixed-fp16", checkpointing="full", zero=1, dp=48, tp=8)),
    (True, "A100-80GB", gpt(72, 14336, 64, 250_880),
     lab.Training(4, 2048, "mixed-fp16", "adamw", "full", "eager", 128, zero=1, dp=4, tp=8, pp=12)),
    (True, "V100-32GB", gpt(24, 2048, 16, 50_304),
     lab.Training(8, 2048, "mixed-fp16", "adamw", "full", "eager", zero=1, dp=8)),
    (True, "V100-32GB", gpt(24, 2048, 16, 50_304),
     lab.Training(1, 2048, "mixed-fp16", attention="eager", zero=1, dp=8)),
    # Qwen2.5, speed benchmark: Hugging Face's generate()
    *[(True, "A100-80GB", f"Qwen2.5-{size}", lab.Inference(1, prompt, 2048))
      for size, prompt in (("0.5B", 30720), ("14B", 30720), ("32B", 6144), ("32B", 30720))],
]  # fmt: skip


def test_no_step_that_ran_out_fits_and_none_that_ran_does_not():
    """Steps on a T4, held out ones among them, and runs on other GPUs; few are too near to tell."""
    rows = [(row.outcome == "fits", row.gpu, row.model, row.run) for row in records(gpu="T4", source="published")]
    found = Counter((ran, lab.estimate(name, run, card).outcome) for ran, card, name, run in [*rows, *PUBLISHED])
    assert found[False, "fits"] == found[True, "out of memory"] == 0
    assert found[False, "out of memory"] >= 6 and found[True, "fits"] >= 95
    unknown = found[True, "unknown"] + found[False, "unknown"]
    assert unknown <= 0.15 * found.total(), found


def test_megatron_deepspeed_took_more_than_megatron_lm_but_not_more_than_allowed():
    """nvidia-smi of BLOOM's prequel (tr11-176B-ml) and of 1.3B parameters (tr3m-1B3.md), in GiB."""
    large = {"seq_len": 2048, "precision": "mixed-bf16", "checkpointing": "full", "zero": 1, "attention": "eager"}
    small = {**large, "precision": "mixed-fp16", "dp": 8}
    for card, spec, run, measured in (
        ("A100-80GB", gpt(70, 14336, 112, 250_880), {**large, "micro_batch": 4, "accumulation": 64, "dp": 8, "tp": 4,
                                                     "pp": 12}, 73),
        ("A100-80GB", gpt(106, 12288, 96, 250_880), {**large, "micro_batch": 2, "accumulation": 128, "dp": 8, "tp": 4,
                                                     "pp": 12}, 65),
        ("V100-32GB", gpt(24, 2048, 16, 50_304), {**small, "micro_batch": 1, "accumulation": 64}, 16),
    ):  # fmt: skip
        most = {}
        for engine in ("false", "true"):
            stack = f"megatron:transformer_engine=false,deepspeed={engine}"
            most[engine] = assessed(spec, lab.Training(**run, stack=stack), card)[1].most
        assert most["false"] < measured * GiB < most["true"]


def test_between_fits_and_out_of_memory_nothing_is_said():
    t4 = lab.gpu("T4")
    room = t4.memory - t4.context
    assert verdict(int(0.79 * room), t4).outcome == "fits"
    assert verdict(int(0.81 * room), t4).outcome == verdict(room, t4).outcome == "unknown"
    over = verdict(room + 1, t4)
    assert over.outcome == "out of memory" and over.least == t4.memory + 1 < over.most


def test_a_context_that_is_not_known_is_between_nothing_and_the_most_of_any_card():
    card, a100 = lab.gpu("A40"), lab.gpu("A100-80GB")
    assert card.context is card.nccl is None
    assert verdict(GiB, card).least == GiB
    assert verdict(GiB, card).most == max(verdict(GiB, known).most for known in lab.gpus() if known.context)
    assert verdict(GiB, card, ranks=8).most - verdict(GiB, card).most == a100.nccl


def at(phase: str, gib: float) -> Moment:
    """A peak of that size."""
    return Moment(phase, "somewhere", {"activations": int(gib * GiB)})


def test_a_step_is_of_one_kind():
    """Logits of 8 × 1024 tokens of GPT-2 are 1.53 GiB in fp32: 2 % of 77 GiB."""
    gpt2, run = lab.model("gpt2"), lab.Training(8, 1024)
    assert kind(gpt2, run, at("optimizer", 10)) == kinds.NO_LOGITS
    assert kind(gpt2, run, at("backward", 78)) == kinds.NO_LOGITS
    assert kind(gpt2, run, at("backward", 76)) == kind(gpt2, run, at("forward", 76)) == kinds.KEPT
    assert kind(gpt2, replace(run, dp=8, zero=3), at("backward", 76)) == kinds.KEPT
    selective, full = (replace(run, checkpointing=name) for name in ("selective", "full"))
    assert kind(gpt2, selective, at("backward", 10)) == kinds.SELECTIVE
    assert kind(gpt2, full, at("backward", 10)) == kinds.RECOMPUTED
    assert kind(gpt2, lab.Inference(), at("decode", 10)) == kinds.GENERATION
    assert kind(gpt2, lab.Inference(weights="nf4", tp=2), at("decode", 10)) == kinds.GENERATION


def test_each_tensor_parallel_rank_has_its_part_of_the_logits():
    llama1b, run = lab.model("Llama-3.2-1B"), lab.Training(8, 1024)  # 3.9 GiB of logits
    assert kind(llama1b, run, at("backward", 60)) == kinds.KEPT
    assert kind(llama1b, replace(run, tp=4), at("backward", 60)) == kinds.NO_LOGITS


def test_runs_that_were_not_drawn_keep_the_margin_of_all():
    llama1b, peak = lab.model("Llama-3.2-1B"), at("optimizer", 10)
    qlora = lab.Training(precision="bf16", lora=QV, quantization="nf4")
    others = [lab.Training(compile=True), lab.Training(optimizer="muon"), lab.Training(pp=2), lab.Training(cp=2),
              lab.Training(precision="bf16", kernels="liger"), lab.Training(precision="bf16", stack="torchtune"),
              lab.Training(tp=2, loss_parallel=False), replace(qlora, dp=8, zero=3)]  # fmt: skip
    for run in others:
        assert kind(llama1b, run, peak) == OTHER
    assert kind(llama1b, qlora, peak) == kind(llama1b, replace(qlora, dp=8), peak) == kinds.NO_LOGITS


def test_plans_and_estimates_say_the_same_of_each_kind():
    a100 = lab.gpu("A100-80GB")
    full = lab.Training(8, 2048, "bf16", checkpointing="full")
    runs = [full, replace(full, checkpointing=None), replace(full, checkpointing="selective", micro_batch=1),
            replace(full, lora=QV), replace(full, micro_batch=1, seq_len=128), replace(full, dp=8, zero=3)]  # fmt: skip
    for run in runs:
        _, fit = assessed("Llama-3.2-1B", run, a100)
        assert fullest(lab.model("Llama-3.2-1B"), run, a100) == fit


def test_megatrons_buffers_leave_fewer_holes_than_a_step_of_transformers():
    """15 ranks whose logs are public reserved at most 1.130 times their peak (benchmarks/memory/room.py)."""
    run, spec, peak = lab.Training(dp=8, zero=1, stack="megatron"), lab.model("Llama-2-7b"), at("backward", 40)
    assert kind(spec, run, peak) == MEGATRON and 1.13 < MEGATRON.holes < OTHER.holes
    expandable = replace(run, stack="megatron:expandable_segments=true")  # its peaks are 2.6 % off at most
    assert kind(spec, expandable, peak) == MEGATRON_EXPANDABLE
    assert 1.026 * 1.032 < MEGATRON_EXPANDABLE.holes < MEGATRON.holes
    for other in ({"attention": "eager"}, {"stack": "megatron:transformer_engine=false"}):
        assert kind(spec, replace(run, **other), peak) == OTHER
    between = lab.gpu("A100-80GB").room(8) * 82 // 100
    assert verdict(between, lab.gpu("A100-80GB"), 8).outcome == "unknown"
    assert verdict(between, lab.gpu("A100-80GB"), 8, MEGATRON.holes).outcome == "fits"
