"""One rank's share of a step: tokens, bytes and attention kernel, worked out once."""

from types import SimpleNamespace

import pytest

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.step import step_memory
from llmlab.hardware.gpu import gpus

LLAMA = lab.model({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
                   "num_hidden_layers": 7, "intermediate_size": 176, "vocab_size": 1000,
                   "max_position_embeddings": 256})  # fmt: skip
LORA = lab.LoRA(4, ("q_proj",))


def test_context_parallelism_divides_tokens_and_a_pipeline_layers():
    run = lab.Training(micro_batch=3, seq_len=128, cp=4, pp=3, tp=2, sequence_parallel=True)
    stages = [share_of(LLAMA, run, stage=stage) for stage in range(3)]
    assert [share.layers for share in stages] == [2, 3, 2]
    assert [(share.first, share.last) for share in stages] == [(True, False), (False, False), (False, True)]
    assert {(share.tokens, share.sequence_ranks) for share in stages} == {(3 * 128 // 4, 2)}


@pytest.mark.parametrize(
    ("settings", "residual", "compute"),
    [
        ({"precision": "bf16"}, 2, 2),
        ({"precision": "autocast-bf16"}, 4, 2),
        ({"precision": "bf16", "quantization": "nf4", "lora": LORA}, 4, 4),  # peft leaves the rest in fp32
        ({"precision": "autocast-bf16", "quantization": "nf4", "lora": LORA}, 4, 2),
    ],
)
def test_around_quantized_linears_everything_is_fp32_but_under_autocast(settings, residual, compute):
    share = share_of(LLAMA, lab.Training(seq_len=64, **settings))
    assert (share.bytes.residual, share.bytes.compute) == (residual, compute)
    assert share.autocast == (residual != compute)


@pytest.mark.parametrize(
    ("settings", "card", "kernel", "attention_bytes"),
    [
        ({"precision": "bf16"}, "A100-80GB", "flash", 2),
        ({"precision": "bf16", "attention": "eager"}, "A100-80GB", "eager", 2),
        ({"precision": "fp32", "attention": "flash"}, None, "flash", 2),  # transformers casts to half
        ({"precision": "autocast-fp16"}, "T4", "math", 4),  # grouped heads, no mask
        ({"precision": "bf16", "attention": "efficient"}, "A100-80GB", "efficient", 2),
    ],
)
def test_the_kernel_says_in_which_bytes_attention_works_and_whether_it_writes_scores(
    settings, card, kernel, attention_bytes
):
    share = share_of(LLAMA, lab.Training(seq_len=64, **settings), card and lab.gpu(card))
    assert (share.kernel, share.attention_bytes) == (kernel, attention_bytes)
    assert share.writes_scores == (kernel in ("eager", "math")) == (not share.fused)


def test_the_cpus_dropout_masks_are_as_wide_as_what_they_mask():
    run = lab.Training(seq_len=64, precision="fp32")
    assert (share_of(LLAMA, run, cpu=True).mask_bytes, share_of(LLAMA, run).mask_bytes) == (4, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "autocast-fp16", "checkpointing": "full"},
        {"precision": "bf16", "compile": True, "checkpointing": "selective", "dp": 8, "zero": 3},
        {"precision": "bf16", "kernels": "liger", "lora": LORA, "quantization": "nf4"},
        {"optimizer": "adamw-8bit"},
        {"stack": "deepspeed", "zero": 3, "dp": 2, "offload": "optimizer"},
        *({"stack": stack, "precision": "bf16"} for stack in ("litgpt", "torchtune")),
        {"stack": "megatron", "pp": 2, "dp": 2, "accumulation": 2},
        {"stack": lab.Megatron(transformer_engine=True, fp8_recipe="delayed")},
        {"stack": "torchtitan", "pp": 2, "dp": 2, "accumulation": 4, "fp8": "rowwise", "compile": True},
    ],
)
def test_memory_reads_four_things_of_a_card_and_megatrons_five(settings):
    """An estimate takes the moments of one card for those of all of its kind (`report._alike`)."""
    run = lab.Training(seq_len=64, **{"precision": "mixed-bf16", **settings})
    for card in gpus():
        seen = SimpleNamespace(
            cublas_workspace=card.cublas_workspace,
            supports_flash_attention_2=card.supports_flash_attention_2,
            prefers_cudnn_attention=card.prefers_cudnn_attention,
            compute_capability=card.compute_capability,
        )
        if getattr(run.stack, "name", "") == "megatron":
            seen.sms = card.sms
        stages = [[step_memory(share_of(LLAMA, run, each, stage=stage)).moments() for each in (card, seen)]
                  for stage in range(run.pp)]  # fmt: skip
        assert all(mine == theirs for mine, theirs in stages)


def test_a_gpu_before_ampere_has_the_chunks_of_ligers_loss_whichever_gpu_was_asked_for_first():
    run = lab.Training(seq_len=256, precision="autocast-fp16", kernels="liger")
    peaks = [lab.estimate(LLAMA, run, card).peak_allocated for card in ("RTX-3090", "T4", "RTX-3090")]
    assert peaks[0] == peaks[2] < peaks[1]


def test_a_card_of_the_same_kind_has_the_same_memory_and_reports_share_nothing():
    run = lab.Training(seq_len=64, precision="fp16", checkpointing="full")
    reports = [lab.estimate(LLAMA, run, card) for card in ("H100", "H200", "T4", "H100")]
    hopper, other, turing, again = (report.parts for report in reports)
    assert hopper == other == again != turing
    reports[0].detail["activations"].clear()
    reports[0].parts.clear()
    assert reports[1].detail["activations"] and lab.estimate(LLAMA, run, "H100").parts == other


def test_before_hopper_recomputed_compiled_blocks_write_a_mask_again_and_once_for_all_heads():
    def masks(gpu, checkpointing):
        run = lab.Training(seq_len=64, precision="bf16", compile=True, checkpointing=checkpointing)
        return share_of(LLAMA, run, lab.gpu(gpu)).remade_masks

    assert masks("A100-80GB", "full") == masks("A100-80GB", "selective") == 1 + 8
    assert masks("A100-80GB", None) == masks("H100", None) == masks("H100", "full") == 0 < masks("H100", "selective")
