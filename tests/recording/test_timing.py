"""FLOP and seconds of a step."""

from torch.utils.flop_counter import flop_registry

import llmlab as lab
from llmlab.recording.timing import ATTENTION_FLOPS, count_flops
from llmlab.step.step import build_step, texts


def test_every_kernel_of_attention_counts_grouped_keys():
    """torch 2.9 to 2.11 refuse them; what a release adds to its table is to be added here."""
    theirs = {f"aten::{each.__name__}" for each in flop_registry if "scaled_dot_product" in each.__name__}
    assert theirs - {"aten::_scaled_dot_product_flash_attention_for_cpu"} < set(ATTENTION_FLOPS)
    q, k = (2, 8, 16, 4), (2, 2, 16, 4)
    for name, count in ATTENTION_FLOPS.items():
        shapes = (q, q, k, k) if "backward" in name else (q, k, k)
        assert count(*shapes) == count(*[q] * len(shapes)) == (5 if "backward" in name else 2) * 2 * 2 * 8 * 16 * 16 * 4


def test_to_count_flops_keeps_nothing_that_checkpointing_frees():
    """FlopCounterMode's own tracker of modules did, on a GPU too: a run that fits would have run out of memory."""
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
              "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 256}  # fmt: skip
    run, spec = lab.Training(micro_batch=4, seq_len=256, checkpointing="full"), lab.model(config)
    step = build_step(spec, run, "cpu", texts(spec, run))
    step()
    peaks = []
    for call in (step, lambda: count_flops(step)):
        with lab.meter("cpu") as meter:
            call()
        peaks.append(meter.peak_allocated)
    assert peaks[1] < 1.4 * peaks[0]
