"""A rank's share of a step, cut up by PyTorch's own engines."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.step.model import build_model
from llmlab.step.ranks import LocalShards, as_built, blocks, check_one_device, check_ranks, join, local, unsynced
from llmlab.step.step import build_step, texts

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64,
         "tie_word_embeddings": False}  # fmt: skip


def test_an_optimizer_of_local_shards_steps_the_models_own_parameters():
    whole = nn.Parameter(torch.full((3,), 2.0))
    shards = LocalShards([whole])
    whole.grad = torch.ones(3)
    shards.take_gradients()
    assert whole.grad is None
    torch.optim.SGD(shards.parameters, lr=1.0).step()
    assert whole.tolist() == [1, 1, 1]


@pytest.fixture
def step():
    """A function that builds the step of a run as rank 0 of a group whose other ranks do not exist."""

    def build(**fields):
        spec, run = lab.model(LLAMA), lab.Training(seq_len=32, **fields)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.world_size)
        return build_step(spec, run, "cpu", texts(spec, run), ranks=join(run, fake=True))

    yield build
    dist.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_division_has_columns_of_what_enters_and_rows_of_what_leaves(step, sequence_parallel):
    """arXiv 1909.08053, section 3: no matrix is whole on a rank, and each product of two needs one all-reduce."""
    model = step(tp=2, sequence_parallel=sequence_parallel).model
    shapes = {name.removeprefix("model.").removesuffix(".weight"): tuple(local(parameter).shape)
              for name, parameter in model.named_parameters()}  # fmt: skip
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    assert shapes[f"{attention}.q_proj"] == (32, 64) and shapes[f"{attention}.k_proj"] == (16, 64)
    assert shapes[f"{attention}.o_proj"] == (64, 32)
    assert shapes[f"{mlp}.gate_proj"] == shapes[f"{mlp}.up_proj"] == (96, 64) and shapes[f"{mlp}.down_proj"] == (64, 96)
    assert shapes["embed_tokens"] == shapes["lm_head"] == (250, 64)
    assert shapes["norm"] == shapes["layers.1.input_layernorm"] == (64,)


@pytest.mark.parametrize(("fields", "share"), [
    ({"dp": 4, "zero": 3}, 4), ({"dp": 4, "zero": 2}, 4), ({"dp": 4, "zero": 3, "dp_replicate": 2}, 2),
    ({"dp": 4, "zero": 1}, 1), ({"dp": 2, "tp": 2, "zero": 3}, 2),
])  # fmt: skip
def test_fsdp_leaves_a_rank_its_share_of_each_block(step, fields, share):
    """With copies, the share of the ranks that make one; tensor parallelism divides a matrix once more."""
    built = step(precision="mixed-bf16" if fields["zero"] > 1 else "fp32", **fields)
    (matrix,) = (p for name, p in built.model.named_parameters() if name.endswith("layers.1.mlp.up_proj.weight"))
    assert local(matrix).shape == (192 // share // fields.get("tp", 1), 64)
    assert isinstance(built.model, nn.parallel.DistributedDataParallel) == (fields["zero"] < 2)
    assert matrix.dtype == torch.float32  # FSDP2's policy casts as it gathers


def test_half_precision_of_fp32_shards_is_fsdps_own():
    for fields, precision in (({"dp": 2, "zero": 3}, "fp32"), ({"dp": 2, "zero": 1}, "mixed-bf16")):
        assert as_built(lab.Training(precision="mixed-bf16", **fields)).precision == precision
    assert as_built(lab.Training(dp=2, zero=3, precision="bf16")).precision == "bf16"


def test_units_are_the_blocks():
    model = build_model(lab.model(LLAMA), lab.Training(seq_len=32), "cpu")
    assert blocks(model) == list(model.model.layers)


def test_gradients_are_not_sent_after_a_micro_batch_where_the_run_says_so():
    calls = []
    model = SimpleNamespace(set_requires_gradient_sync=calls.append)
    for sync, seen in ((True, []), (False, [False])):
        with unsynced(model, lab.Training(dp=2, zero=3, accumulation=2, sync_each_batch=sync)):
            assert calls == seen
    assert calls == [False, True]


@pytest.mark.parametrize(("fields", "error", "words"), [
    ({"pp": 2}, NotAvailable, "pp=2"), ({"cp": 2}, NotAvailable, "cp=2"),
    ({"dp": 2, "compile": True}, NotAvailable, "compile=True"),
    ({"dp": 2, "offload": "optimizer", "precision": "mixed-bf16"}, NotAvailable, "offload='optimizer'"),
    ({"dp": 2, "zero": 3, "optimizer": "lion"}, NotAvailable, "optimizer='lion' with zero=3"),
    ({"dp": 2, "zero": 1, "precision": "mixed-bf16"}, NotAvailable, "precision='mixed-bf16' with zero=1"),
    ({"dp": 2, "zero": 2, "optimizer": "adafactor"}, NotAvailable, "optimizer='adafactor' with zero=2"),
    ({"dp": 2, "tp": 2}, NotAvailable, "dp=2, tp=2 with zero=0"),
    ({"dp": 2, "tp": 2, "zero": 1}, NotAvailable, "dp=2, tp=2 with zero=1"),
    ({"tp": 2, "lora": lab.LoRA()}, NotAvailable, "tp=2 with LoRA"),
    ({"dp": 4, "zero": 1, "dp_replicate": 2}, NotAvailable, "dp_replicate=2 with zero=1"),
    ({"tp": 4}, SpecError, "tp=4 does not divide .* 2 key-value heads"),
    ({"tp": 2, "sequence_parallel": True, "seq_len": 33}, SpecError, "33 tokens of seq_len"),
])  # fmt: skip
def test_what_torchs_engines_do_not_do_is_refused_by_name(fields, error, words):
    with pytest.raises(error, match=words):
        check_ranks(lab.model(LLAMA), lab.Training(**{"seq_len": 32, **fields}), "measure")


def test_what_they_do_is_not_refused():
    with pytest.raises(NotAvailable, match="tp=2 for gpt2"):  # whose linears have other names
        check_ranks(lab.model("gpt2"), lab.Training(tp=2), "measure")
    for fields in ({"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 4, "zero": 3, "dp_replicate": 2}, {"tp": 2},
                   {"dp": 2, "tp": 2, "zero": 2}, {"dp": 2, "zero": 3, "precision": "mixed-bf16"}):  # fmt: skip
        check_ranks(lab.model(LLAMA), lab.Training(seq_len=32, **fields), "measure")
        with pytest.raises(NotAvailable, match=f"dp={fields['dp']}" if "dp" in fields else "tp=2"):
            check_one_device(lab.Training(seq_len=32, **fields))
    offloaded = lab.Training(zero=2, offload="optimizer", precision="mixed-bf16")
    check_one_device(offloaded)  # DeepSpeed offloads with ZeRO only
