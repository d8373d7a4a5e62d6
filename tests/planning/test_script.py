"""train.py: the packages that it needs where it runs."""

import re
import sys

import pytest

import llmlab as lab
from llmlab.planning.files.script import kind, packages, training_script

LORA, SHARDED = {"lora": lab.LoRA(rank=4)}, {"dp": 2, "zero": 3}
TUNED = {"accelerate", "peft", "trl", "datasets"}


@pytest.mark.parametrize(("fields", "needed"), [
    ({}, {"accelerate"}),  # which transformers' Trainer asks for
    ({"optimizer": "adamw-8bit"}, {"accelerate", "bitsandbytes"}),  # whose states transformers leaves to bitsandbytes
    ({"optimizer": "lion"}, {"accelerate", "bitsandbytes"}),
    ({**SHARDED, "precision": "mixed-bf16"}, set()),  # FSDP2 is torch's own
    ({**SHARDED, "precision": "bf16", "kernels": "liger"}, {"liger-kernel"}),
    (LORA, TUNED),
    ({**LORA, "quantization": "nf4"}, TUNED | {"bitsandbytes"}),
    ({**LORA, **SHARDED, "precision": "bf16"}, {"peft"}),
    ({"dp": 2, "zero": 2, "precision": "mixed-bf16", "stack": "deepspeed"}, {"accelerate", "deepspeed"}),
])  # fmt: skip
def test_a_script_needs_what_it_imports_and_what_its_options_ask_of_transformers(fields, needed):
    run = lab.Training(**fields)
    assert {*packages(run)} == {"torch", "transformers", *needed}
    script = training_script(lab.model("HuggingFaceTB/SmolLM2-135M"), run, "a model", False, "a title")
    imported = {name.replace("_", "-") for name in re.findall(r"^ *(?:from|import) (\w+)", script, re.MULTILINE)}
    chosen = {"peft", "bitsandbytes", "liger-kernel", "deepspeed"}  # imported where the run has an option of theirs
    assert imported - chosen - sys.stdlib_module_names <= {*packages(run)}


@pytest.mark.parametrize(("fields", "script"), [
    ({}, "trainer"), ({"precision": "mixed-bf16"}, "pytorch"), ({"optimizer": "muon"}, "pytorch"),
    ({**SHARDED, "precision": "mixed-bf16"}, "pytorch"), ({"dp": 2, "zero": 1, "precision": "mixed-bf16"}, "trainer"),
    ({**SHARDED, "precision": "mixed-bf16", "offload": "optimizer"}, "trainer"), (LORA, "sft"),
    ({**LORA, **SHARDED, "precision": "bf16"}, "pytorch"), ({**LORA, **SHARDED, "precision": "mixed-bf16"}, "sft"),
])  # fmt: skip
def test_the_script_is_that_which_trains_such_a_run(fields, script):
    assert kind(lab.Training(**fields)) == script


@pytest.mark.parametrize(("fields", "words"), [
    ({"tp": 2}, "tp=2"), ({"fp8": "rowwise", "compile": True, "precision": "bf16"}, "fp8='rowwise'"),
    ({"kernels": "fused-loss"}, "give kernels='liger'"), ({"attention": "efficient"}, "attention='efficient'"),
    ({"dp": 2, "stack": "torchtitan"}, "its own training program"), ({**SHARDED, "optimizer": "lion"}, "zero=3"),
    ({**LORA, "precision": "mixed-bf16"}, "give bf16"),
    ({**LORA, **SHARDED, "quantization": "nf4", "precision": "bf16"}, "cannot be sharded"),
    ({**LORA, "quantization": "gptq", "precision": "fp16"}, "AutoGPTQ"),
    ({**LORA, "quantization": "nf4", "precision": "autocast-bf16", "half_layers": "embeddings"}, "give 'all'"),
])  # fmt: skip
def test_what_no_script_trains_is_refused(fields, words):
    with pytest.raises(lab.SpecError, match=words):
        kind(lab.Training(**fields))
