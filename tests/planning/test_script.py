"""train.py: the packages that it needs where it runs."""

import re
import sys

import pytest

import llmlab as lab
from llmlab.planning.files.script import packages, training_script

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
