"""What a model, a run and a GPU must agree on."""

from dataclasses import replace

import pytest

import llmlab as lab

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
         "intermediate_size": 2048, "vocab_size": 2048, "max_position_embeddings": 2048}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "run", "gpu", "words"),
    [
        ("gpt2", lab.Training(seq_len=2048), None, ["seq_len=2048", "1024 positions"]),
        ("gpt2", lab.Inference(prompt_len=1000, new_tokens=100), None, ["prompt_len + new_tokens=1100", "1024"]),
        ("gpt2", lab.Training(tp=5), None, ["tp=5", "12 heads"]),
        ("gpt2", lab.Training(pp=9), None, ["pp=9", "12 layers", "pp=7 at most", "pp=12"]),
        ("gpt2", lab.Training(dp=8, ep=8), None, ["ep=8", "no experts"]),
        ("gpt2", lab.Training(lora=lab.LoRA()), None, ["q_proj", "c_attn"]),
        ("gpt2", lab.Training(precision="autocast-bf16"), "T4", ["T4", "no bf16", "autocast-fp16"]),
        ("gpt2", lab.Training(precision="bf16"), "V100-32GB", ["V100-32GB", "no bf16"]),
        ("gpt2", lab.Inference(batch=1, prompt_len=8, new_tokens=8), "T4", ["T4", "no bf16", "fp16"]),
        ("gpt2", lab.Training(precision="fp16", attention="flash"), "T4", ["8.0", "7.5", "sdpa"]),
        ("gpt2", lab.Training(attention="flash"), "A100-80GB", ["fp32", "sdpa"]),
    ],
)
def test_disagreements_name_both_sides_and_the_way_out(model, run, gpu, words):
    with pytest.raises(lab.SpecError) as error:
        lab.estimate(model, run, gpu)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("run", [None, "training", {"micro_batch": 1}, 4, lab.Training])
@pytest.mark.parametrize("verb", [lab.estimate, lab.measure, lab.compare], ids=lambda verb: verb.__name__)
def test_what_is_no_run_is_refused_by_every_verb(verb, run):
    with pytest.raises(lab.SpecError, match=r"run=.* is a \w+; give a lab\.Training\(\.\.\.\) or a lab\.Inf") as error:
        verb("gpt2", run)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("run", [lab.Training(seq_len=64), lab.Inference(prompt_len=64, new_tokens=8)])
def test_gemma_2_has_no_sdpa_and_every_verb_says_so(run):
    # transformers: Gemma2PreTrainedModel._supports_sdpa = False; flash takes the softcap, eager is written out.
    for verb in (lab.estimate, lab.measure):
        with pytest.raises(lab.SpecError, match="gemma2 has no attention='sdpa'; use one of eager, flash"):
            verb("gemma-2-2b", replace(run, attention="sdpa"))
    assert lab.estimate("gemma-2-2b", run) == lab.estimate("gemma-2-2b", replace(run, attention="eager"))
    for attention in ("eager", "flash"):
        half = {"precision": "bf16"} if isinstance(run, lab.Training) else {}
        assert lab.estimate("gemma-2-2b", replace(run, attention=attention, **half)).peak_allocated > 5 * 10**9


@pytest.mark.parametrize(("model", "fields", "words"), [
    (LLAMA, {"compile": True}, ["compile=True", "give one"]),
    (LLAMA, {"dp": 2, "zero": 3}, ["zero=3", "buffers"]),
    (LLAMA, {"tp": 2}, ["tp=2", "buffers"]),
    ("mistralai/Mixtral-8x7B-v0.1", {}, ["Mixtral", "experts"]),
    ({**LLAMA, "intermediate_size": 2016}, {}, ["down_proj", "2016 × 512", "128"]),
])  # fmt: skip
def test_what_autogptqs_layer_does_not_do_is_refused(model, fields, words):
    with pytest.raises(lab.SpecError) as error:
        lab.estimate(model, lab.Training(2, 512, "fp16", lora=lab.LoRA(), quantization="gptq", **fields), "A100-80GB")
    assert all(word in str(error.value) for word in ("quantization='gptq'", *words))
