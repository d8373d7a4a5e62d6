"""What the tower of a vision-language model keeps for backward."""

from dataclasses import replace

import llmlab as lab
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.tower import tower_activations

GEMMA = lab.model("google/gemma-3-4b-pt")  # SigLIP: 27 layers, 1,152 and 4,304 wide; 896² pixels, patches of 14


def test_a_layer_keeps_of_each_patch_eight_tensors_of_its_width_and_two_of_its_mlps():
    run = lab.Training(micro_batch=2, seq_len=2048, images=3, precision="bf16")
    patches = 2 * 3 * (896 // 14) ** 2

    def kept(**changes):
        return tower_activations(share_of(GEMMA, replace(run, **changes)))

    assert kept() == patches * 27 * 2 * (8 * 1152 + 2 * 4304)
    assert kept(precision="autocast-bf16") == patches * 27 * (2 * 4 * 1152 + 2 * (6 * 1152 + 2 * 4304))
    assert kept(checkpointing="full") == patches * 27 * 2 * 1152
    assert kept(images=0) == kept(lora=lab.LoRA()) == 0
