"""The moments of a step of DeepSpeed's engine."""

from importlib.util import find_spec

import pytest

import llmlab as lab

simulated = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs llmlab[distributed]")
SMALL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TIED = {**SMALL, "tie_word_embeddings": True}
RANKS = {"stack": "deepspeed", "dp": 8, "seq_len": 1024}
BUCKETS = "reduce_bucket_size=20000000"
DEEPSPEED = {
    "no ZeRO": {"zero": 0},
    "stage 1": {"zero": 1, "checkpointing": "full"},
    "stage 2": {"zero": 2},
    "stage 3": {"zero": 3},
    "stage 3, 64 ranks": {"zero": 3, "dp": 64, "checkpointing": "full"},
    "stage 1, accumulated": {"zero": 1, "accumulation": 2},
    "stage 2, several buckets": {"zero": 2, "checkpointing": "full", "stack": f"deepspeed:{BUCKETS}", "seq_len": 128},
    "stage 2, overlapped": {"zero": 2, "stack": f"deepspeed:{BUCKETS},overlap_comm=True", "accumulation": 2},
    "stage 2, no bucket": {"zero": 2, "checkpointing": "full", "stack": "deepspeed:contiguous_gradients=False"},
    "stage 2, summed in fp32": {"zero": 2, "stack": f"deepspeed:{BUCKETS},grad_accum_dtype=fp32", "seq_len": 128},
    "stage 1, summed in fp32": {"zero": 1, "stack": "deepspeed:grad_accum_dtype=fp32", "seq_len": 128},
    "stage 1, summed at once": {
        "zero": 1, "stack": "deepspeed:grad_accum_dtype=fp32,immediate_grad_update=True", "seq_len": 128,
    },
    "stage 3, summed in fp32": {"zero": 3, "stack": f"deepspeed:{BUCKETS},grad_accum_dtype=fp32"},
    "stage 1, offloaded": {"zero": 1, "offload": "optimizer", "stack": f"deepspeed:{BUCKETS}"},
    "stage 2, offloaded": {"zero": 2, "offload": "optimizer", "dp": 1, "stack": f"deepspeed:{BUCKETS}"},
    "stage 3, all offloaded": {"zero": 3, "offload": "optimizer+parameters"},
    "stage 3, one GPU": {"zero": 3, "dp": 1, "checkpointing": "full"},
    "stage 3, one GPU, offloaded": {"zero": 3, "dp": 1, "offload": "optimizer"},
    "stage 3, one GPU, all offloaded": {"zero": 3, "dp": 1, "offload": "optimizer+parameters"},
    "stage 2, one GPU": {"zero": 2, "dp": 1},
    "fp16, lion": {"zero": 2, "precision": "mixed-fp16", "optimizer": "lion"},
    "torch's AdamW": {"zero": 2, "stack": f"deepspeed:{BUCKETS},torch_adam=True", "seq_len": 128},
}  # fmt: skip
BROAD = {**SMALL, "hidden_size": 1024, "intermediate_size": 3072, "num_key_value_heads": 8, "num_hidden_layers": 2}
TIED_BROAD = {**BROAD, "tie_word_embeddings": True}
SMALL_BUCKET = f"deepspeed:{BUCKETS}"
FEW_LIVE = ",stage3_max_live_parameters=8000000,stage3_max_reuse_distance=8000000"
ZERO_3 = {
    "the head's own weight": (TIED_BROAD, {"stack": f"deepspeed:{FEW_LIVE[1:]}", "seq_len": 1024}),
    "a recomputed block's weights": (
        {**BROAD, "num_hidden_layers": 4}, {"stack": SMALL_BUCKET + FEW_LIVE, "checkpointing": "full"}
    ),
    "gradients on their way to the host": (BROAD, {"offload": "optimizer", "dp": 2}),
    "gradients on their way to the host, one GPU": (TIED_BROAD, {"offload": "optimizer", "dp": 1}),
    "the embedding's weight": (TIED_BROAD, {"stack": SMALL_BUCKET + FEW_LIVE, "seq_len": 256}),
    "no whole model, as it is made": (
        {**BROAD, "num_hidden_layers": 8}, {"stack": SMALL_BUCKET + FEW_LIVE, "dp": 64, "checkpointing": "full"}
    ),
}  # fmt: skip
CASES = {
    # Every second setting with a tied head.
    **{name: ({**(SMALL, TIED)[number % 2], "num_hidden_layers": 2}, {**RANKS, **given})
       for number, (name, given) in enumerate(DEEPSPEED.items())},
    # Of few words, because otherwise the logits are the largest part.
    **{f"gathered or sent to the host, {name}": (
        model, {**RANKS, "zero": 3, "seq_len": 128, "stack": SMALL_BUCKET, **given}
    ) for name, (model, given) in ZERO_3.items()},
    "an embedding larger than a bucket is copied beside all gradients": (
        SMALL, {**RANKS, "seq_len": 128, "zero": 1, "stack": "deepspeed:reduce_bucket_size=10000000"}
    ),
    "a tied embedding larger than a bucket: only its sum is left": (
        TIED, {"dp": 2, "seq_len": 128, "zero": 2, "offload": "optimizer",
               "stack": "deepspeed:reduce_bucket_size=10000000"}
    ),
}  # fmt: skip


@simulated
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_deepspeeds_engine_takes(name, agree):
    model, given = CASES[name]
    agree(model, lab.Training(**given), "A100-80GB", 0.02)


@simulated
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeeds_norm_is_taken_in_double_precision(stage):
    """The most of the update, 8 bytes for each element of the embedding; with 4 it would be 4 % less."""
    model = {**SMALL, "intermediate_size": 1024, "num_hidden_layers": 2}
    run = lab.Training(dp=8, seq_len=128, zero=stage, stack="deepspeed")
    estimate, simulation = (verb(model, run, "H100-80GB").phases for verb in (lab.estimate, lab.simulate))
    assert estimate["optimizer"] == pytest.approx(simulation["optimizer"], rel=0.02)


@simulated
def test_deepspeeds_weights_pile_up_before_the_loss():
    forward = {}
    for live in (20_000_000, 200_000_000):
        stack = lab.DeepSpeed(stage3_max_live_parameters=live, stage3_max_reuse_distance=live)
        run = lab.Training(dp=8, zero=3, seq_len=1024, stack=stack)
        forward[live] = lab.simulate(SMALL, run, "A100-80GB").phases["forward"]
    assert forward[200_000_000] - forward[20_000_000] > 0.3 * 2 * lab.model(SMALL).parameters


def test_deepspeed_flattens_weights_on_the_host_if_the_gpu_has_room_for_one_copy():
    """zero/stage_1_and_2.py, flatten_on_accelerator. The two GPUs differ in their memory alone."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = lab.Training(seq_len=128, dp=64, zero=2, precision="mixed-bf16", checkpointing="full", stack="deepspeed")
    for gpu, copies in (("RTX-A6000", 2), ("RTX-3090", 1)):
        report = lab.estimate(spec, run, gpu)
        assert report.phases["load"] == pytest.approx(copies * 2 * spec.parameters, rel=0.05)
        assert report.outcome != "out of memory"
