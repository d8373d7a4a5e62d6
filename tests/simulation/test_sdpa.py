"""Which attention a simulated GPU runs, and what it takes: torch's own choice, the pinned kernel, flash-attn's.

    B  batch    H  query heads    K  key and value heads    T  positions    D  head size
"""

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import llmlab as lab
from llmlab.simulation.patching.sdpa import math_attention
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

B, H, K, T, D = 2, 8, 2, 128, 64
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 500,
         "max_position_embeddings": 512}  # fmt: skip
SCORES = 8 * 512 * 512


def heads(device: str, kv_heads: int = K, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [
        torch.randn(B, each, T, D, dtype=dtype, device=device, requires_grad=True) for each in (H, kv_heads, kv_heads)
    ]


# ---- the plain formula


@pytest.mark.parametrize("gpu", ["T4", "A100-40GB", "H100-80GB"])
def test_fewer_key_heads_are_refused_as_torch_refuses_them(gpu):
    with pytest.raises(RuntimeError, match=r"tensor a \(8\) must match the size of tensor b \(2\)") as real:
        F.scaled_dot_product_attention(*heads("cpu"))
    with lab.simulator(gpu), pytest.raises(RuntimeError, match=r"\(8\).*\(2\)") as ours:
        F.scaled_dot_product_attention(*heads("cuda"))
    assert str(ours.value) == str(real.value)
    with lab.simulator(gpu), pytest.raises(RuntimeError, match="must divide the number of heads"):
        F.scaled_dot_product_attention(*heads("cuda", kv_heads=3), enable_gqa=True)


def operators(run) -> list[str]:
    """Names of the operators that `run` calls itself, not of those that they call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    own = "aten::_scaled_dot_product_attention_math"
    calls = [event for event in seen.events() if event.name.startswith("aten::") and event.name != own]
    return [event.name for event in calls if event.cpu_parent is None or event.cpu_parent.name == own]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("causal", "dropout", "kv_heads"), [(True, 0.0, K), (False, 0.1, H)])
def test_the_plain_formula_runs_the_operators_that_torch_runs_on_plain_tensors(dtype, causal, dropout, kv_heads):
    given = heads("cpu", kv_heads, dtype)
    kernel = torch.ops.aten._scaled_dot_product_attention_math
    torchs = operators(lambda: kernel(*given, None, dropout, causal, enable_gqa=kv_heads != H))
    ours = operators(lambda: math_attention(*given, None, dropout, causal, None, kv_heads != H))
    same = {"aten::numpy_T": "aten::transpose"}
    assert [same.get(name, name) for name in ours] == torchs
    torch.manual_seed(0)
    expected = kernel(*given, None, dropout, causal, enable_gqa=kv_heads != H)[0]
    torch.manual_seed(0)
    assert torch.equal(math_attention(*given, None, dropout, causal, None, kv_heads != H), expected)


def test_grouped_heads_on_a_t4_take_what_torchs_plain_formula_takes_on_a_cpu():
    """sdp_utils.cpp: before Ampere no FlashAttention, and the memory-efficient kernel has no grouped heads. Torch's own
    formula is the same code on a CPU, and is measured there."""

    def attend(tensors: list[torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    real = heads("cpu")
    with sdpa_kernel(SDPBackend.MATH):
        attend(real)
        with lab.meter("cpu") as meter:
            kept = attend(real)
    with lab.simulator("T4") as card:
        tensors = heads("cuda")
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS takes its workspace
        held = card.allocated
        card.reset_peak()
        out = attend(tensors)
        assert card.allocated - held == (2 + 3 * 4) * B * H * T * D + 4 * B * H * T * T  # q, k, v and scores in fp32
        assert card.peak_allocated - held == pytest.approx(meter.peak_allocated, abs=4096)  # blocks of 512 B
    assert kept.shape == out.shape


def test_a_mask_of_booleans_becomes_one_of_numbers_before_any_kernel():
    """attention.cpp, convert_boolean_attn_mask: 0 and -inf in the dtype of the queries, and no wider copy."""
    with lab.simulator("T4") as card:
        q, k, v = heads("cuda", kv_heads=H)
        mask = torch.ones(T, T, dtype=torch.bool, device="cuda")
        held = card.allocated
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert card.allocated - held == out.nbytes + 4 * B * H * T + 2 * T * T


# ---- torch's choice and the pinned kernel, in whole runs


@pytest.mark.parametrize("precision", ["fp16", "autocast-fp16", "fp32"])
def test_transformers_leaves_grouped_heads_to_torch_and_a_t4_writes_the_scores_out(precision):
    sdpa, efficient = (
        lab.simulate(LLAMA, lab.Training(seq_len=512, precision=precision, optimizer="sgd", attention=attention), "T4")
        for attention in ("sdpa", "efficient")
    )
    more = sdpa.phases["forward"] - efficient.phases["forward"]
    assert 3 * 4 * SCORES < more < 4.5 * 4 * SCORES  # fp32 in each of three layers; the last one's temporaries
    guesses = [lab.estimate(LLAMA, report.run, "T4").peak_allocated for report in (sdpa, efficient)]
    assert guesses == [pytest.approx(report.peak_allocated, rel=0.04) for report in (sdpa, efficient)]


@pytest.mark.parametrize("settings", [
    {"checkpointing": "full"}, {"checkpointing": "selective"}, {"quantization": "nf4", "lora": lab.LoRA()},
], ids=str)  # fmt: skip
def test_the_estimate_of_scores_written_out_is_what_is_simulated(settings, agree):
    run = lab.Training(seq_len=512, precision="fp16", optimizer="sgd", **settings)
    guess, found = agree(LLAMA, run, "T4", 0.04)
    assert guess.flops == found.flops


def test_a_prompt_of_grouped_heads_writes_its_scores_out_too(agree):
    run = lab.Inference(batch=2, prompt_len=448, new_tokens=4, weights="fp16", kv="fp16")
    _, found = agree(LLAMA, run, "T4", 0.04)
    pinned = lab.simulate(LLAMA, lab.Inference(**{**run.to_dict(), "attention": "efficient"}), "T4")
    assert found.peak_allocated > pinned.peak_allocated + 2 * 8 * 448 * 448 * 4


def test_the_pinned_kernel_takes_the_same_wherever_torch_would_take_another():
    run = lab.Training(seq_len=256, precision="fp16", optimizer="sgd", attention="efficient")
    old, new = (lab.simulate(LLAMA, run, gpu) for gpu in ("T4", "A100-40GB"))
    assert old.phases["forward"] == new.phases["forward"]
    assert lab.estimate(LLAMA, run, "A100-40GB").peak_allocated == pytest.approx(new.peak_allocated, rel=0.04)


def test_the_way_round_it_that_the_book_gives_is_the_pinned_kernel(monkeypatch):
    from transformers.integrations import sdpa_attention

    run = lab.Training(seq_len=256, precision="fp16", optimizer="sgd")
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", lambda *args: False)
    around = lab.simulate(LLAMA, run, "T4")
    pinned = lab.simulate(LLAMA, lab.Training(**{**run.to_dict(), "attention": "efficient"}), "T4")
    assert (around.peak_allocated, around.peak_reserved) == (pinned.peak_allocated, pinned.peak_reserved)


# ---- flash-attn


def test_flash_attn_keeps_a_log_sum_exp_a_row_and_backward_sums_dq_in_fp32():
    """flash_api.cpp, mha_fwd: out, softmax_lse, rng_state. flash_attn_interface.py, FlashAttnFunc.backward, and
    mha_bwd: dq, dk, dv; then softmax_d and dq_accum, rows rounded up to 128 and heads to 32; dK and dV of each head."""
    with lab.simulator("A100-40GB") as card:
        attend = flash_attn_func()
        q, k, v = (
            torch.randn(B, T, each, D, dtype=torch.bfloat16, device="cuda", requires_grad=True) for each in (H, K, K)
        )
        held = card.allocated
        out = attend(q, k, v, causal=True)
        assert card.allocated - held == out.nbytes + 4 * B * H * T + 512
        grad = torch.empty_like(out)
        held = card.allocated
        card.reset_peak()
        made = torch.autograd.grad(out, (q, k, v), grad)
        rows = 4 * B * H * T + 4 * B * H * T * D
        assert card.peak_allocated - held == sum(each.nbytes for each in made) + rows + 2 * q.nbytes
        assert [each.shape for each in made] == [q.shape, k.shape, v.shape]


def test_flash_attn_pads_heads_to_multiples_of_8_columns():
    """flash_attn_interface.py, FlashAttnFunc.forward: F.pad of queries, keys and values, and its result is cut."""
    with lab.simulator("A100-40GB") as card:
        q = torch.randn(B, T, H, 60, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        held = card.allocated
        out = flash_attn_func()(q, q, q, causal=True)
        assert out.shape == q.shape and card.allocated - held == 4 * (2 * B * T * H * 64) + 4 * B * H * T + 512


def flash_attn_func():
    """What transformers calls, inside a simulator's block."""
    from transformers import modeling_flash_attention_utils as utils

    return utils._lazy_imports("flash_attention_2")[0]


@pytest.mark.parametrize("settings", [
    {"precision": "bf16"}, {"precision": "autocast-bf16", "checkpointing": "full", "micro_batch": 2},
    {"precision": "bf16", "checkpointing": "selective"},
    {"precision": "bf16", "quantization": "nf4", "lora": lab.LoRA()},
], ids=str)  # fmt: skip
def test_a_step_with_flash_attn_takes_what_the_formulas_say(settings, agree):
    run = lab.Training(seq_len=512, optimizer="sgd", attention="flash", **settings)
    guess, found = agree(LLAMA, run, "A100-40GB", 0.05)
    assert guess.flops == found.flops and "scratch-unknown" not in [note.code for note in found.notes]


def test_flash_attn_and_torchs_flash_kernel_take_the_same():
    runs = [lab.Training(seq_len=512, precision="bf16", optimizer="sgd", attention=way) for way in ("flash", "sdpa")]
    package, torchs = (lab.simulate(LLAMA, run, "A100-40GB") for run in runs)
    assert abs(package.peak_allocated - torchs.peak_allocated) <= 3 * 512  # torch keeps an unused number a layer
    assert package.flops == torchs.flops


def test_a_generation_with_flash_attn():
    run = lab.Inference(batch=2, prompt_len=400, new_tokens=4, attention="flash")
    guess, found = (verb(LLAMA, run, "H100-80GB") for verb in (lab.estimate, lab.simulate))
    assert guess.peak_allocated == pytest.approx(found.peak_allocated, rel=0.1) and guess.flops == found.flops


def test_a_users_model_asks_for_flash_attention_2_by_name():
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers import modeling_flash_attention_utils as utils

    before = dict(vars(utils))
    config = LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})

    def step(gpu: str) -> int:
        with lab.simulator(gpu) as card:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float16, attn_implementation="flash_attention_2"
            ).cuda()
            ids = torch.randint(500, (1, 512), device="cuda")  # one sequence: is it packed, asks transformers
            model(input_ids=ids, labels=ids).loss.backward()
            return card.peak_allocated

    assert step("A100-40GB") > 0
    with pytest.raises(RuntimeError, match="only supports Ampere GPUs or newer"):
        step("T4")
    assert dict(vars(utils)) == before


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"dtype": torch.float32}, RuntimeError, "only support fp16 and bf16"),
    ({"size": 264}, RuntimeError, "at most 256"),
])  # fmt: skip
def test_what_flash_attn_refuses_is_refused(given, error, words):
    dtype, size = given.get("dtype", torch.bfloat16), given.get("size", D)
    with lab.simulator("A100-40GB"):
        x = torch.randn(1, 16, 2, size, dtype=dtype, device="cuda")
        with pytest.raises(error, match=words):
            flash_attn_func()(x, x, x)


def test_packed_sequences_keep_a_log_sum_exp_a_row_and_add_128_rows_each_to_dq():
    """flash_api.cpp, mha_varlen_fwd and mha_varlen_bwd: softmax_lse (H, total), softmax_d (H, total + 128 n), dq_accum
    (total + 128 n, H, D), and dK and dV of each query head. Scores are those of each sequence alone."""
    from transformers import modeling_flash_attention_utils as utils

    lengths = (100, 28, 300)
    total, rows = sum(lengths), sum(lengths) + 128 * len(lengths)
    with lab.simulator("A100-40GB") as card, card.operators() as operators:
        attend = utils._lazy_imports("flash_attention_2")[1]
        starts = torch.tensor([0, 100, 128, 428], dtype=torch.int32).cuda()
        q, k, v = (
            torch.randn(total, each, D, dtype=torch.bfloat16, device="cuda", requires_grad=True) for each in (H, K, K)
        )
        held = card.allocated
        out = attend(q, k, v, starts, starts, max(lengths), max(lengths), causal=True)
        assert 0 <= card.allocated - held - out.nbytes - 4 * H * total <= 2 * 512
        grad = torch.empty_like(out)
        held = card.allocated
        card.reset_peak()
        made = torch.autograd.grad(out, (q, k, v), grad)
        extra = card.peak_allocated - held - sum(each.nbytes for each in made) - 2 * q.nbytes
        assert 0 <= extra - 4 * H * rows - 4 * H * rows * D < 2 * 512
        counted = operators.flops
    scores = sum(length**2 for length in lengths) * H * D * 2
    assert counted == pytest.approx(7 * scores, rel=0.01)  # 2 matmuls forward, 5 backward


def packed_step(documents: int, length: int) -> tuple[int, int]:
    """Return the peak and the FLOP of a transformers step on documents in one row, told apart by their positions."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{name: value for name, value in LLAMA.items() if name != "model_type"})
    with lab.simulator("A100-40GB") as card, card.operators() as operators:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            del operators[:]
            ids = torch.randint(500, (1, documents * length)).cuda()
            positions = torch.arange(length).repeat(documents)[None].cuda()
            model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return card.peak_allocated, operators.flops


def test_packed_documents_take_what_as_many_sequences_of_their_length_take():
    peak, flops = packed_step(documents=4, length=256)
    run = lab.Training(micro_batch=4, seq_len=256, precision="bf16", optimizer="sgd", attention="flash")
    apart = lab.simulate(LLAMA, run, "A100-40GB")
    assert peak == pytest.approx(apart.peak_allocated, rel=0.03) and flops == apart.flops
    whole = lab.simulate(LLAMA, lab.Training(seq_len=1024, **{name: getattr(run, name) for name in
                                             ("precision", "optimizer", "attention")}), "A100-40GB")  # fmt: skip
    assert flops < whole.flops  # a row of one document has scores between all its tokens


# ---- the choice


EFFICIENT, FLASH, CUDNN, MATH = "efficient", "flash", "cudnn", "math"
fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
CHOICES = [  # GPU, dtype, head size, with a mask, and sdp_utils.cpp's choice
    ("T4", fp16, 64, False, EFFICIENT), ("T4", bf16, 64, False, MATH), ("T4", fp32, 64, False, EFFICIENT),
    ("T4", fp16, 12, False, MATH), ("T4", fp16, 64, True, EFFICIENT),
    ("A100-40GB", fp16, 64, False, FLASH), ("A100-40GB", bf16, 256, False, FLASH),
    ("A100-40GB", fp32, 64, False, EFFICIENT), ("A100-40GB", bf16, 64, True, EFFICIENT),
    ("A100-40GB", bf16, 264, False, EFFICIENT),
    ("A100-40GB", fp32, 6, False, MATH), ("H100-80GB", bf16, 64, False, CUDNN),
    ("H100-80GB", bf16, 256, False, CUDNN), ("B200", bf16, 256, False, FLASH), ("B200", bf16, 128, False, CUDNN),
    ("H100-80GB", bf16, 264, False, EFFICIENT), ("H100-80GB", fp32, 64, False, EFFICIENT),
]  # fmt: skip


def blocks(size):
    return ceil(size / 512) * 512


def _nodes(out):
    """The names of what autograd runs, one after the other."""
    names, node = "", out.grad_fn
    while node is not None:
        names += node.name().lower()
        node = node.next_functions[0][0] if node.next_functions else None
    return names


@pytest.mark.parametrize(("gpu", "dtype", "D", "masked", "choice"), CHOICES, ids=str)
def test_the_kernel_of_attention_and_what_it_saves(gpu, dtype, D, masked, choice):
    """transformers/cuda/sdp_utils.cpp chooses. attention.cu and flash_api.cpp save beside the output: log-sum-exps in
    fp32, of T rows, or of T rounded up to 32 (kAlignLSE); seed and offset, which only flash and cuDNN keep on the GPU.
    attention.cpp, preprocess_mask, pads a mask's rows to 8 elements, and repeats them as a view."""
    T = 100  # no multiple of 8 or 32
    with simulator(gpu) as sim:
        q, k, v = (torch.empty(B, H, T, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.zeros(T, T, device="cuda", dtype=dtype) if masked else None
        before = sim.allocated
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        held = sim.allocated - before
    taken = [name for name in (EFFICIENT, FLASH, CUDNN) if name in _nodes(out)]
    assert taken == ([] if choice == MATH else [choice])
    output = blocks(B * H * T * D * dtype.itemsize)
    if choice == EFFICIENT:
        padded = blocks(T * ceil(T / 8) * 8 * dtype.itemsize) if masked else 0
        assert held == output + 4 * B * H * ceil(T / 32) * 32 + padded
    elif choice in (FLASH, CUDNN):
        assert held == output + blocks(4 * B * H * T) + 2 * 512
    else:
        assert held >= output + B * H * T * T * dtype.itemsize  # the probabilities are written out


@pytest.mark.parametrize(("dropout", "name"), [(0.1, FLASH), (0.125, CUDNN), (0.5, CUDNN)])
def test_cudnns_attention_drops_sixteenths_only(dropout, name):
    """check_cudnn_dropout in torch 2.13."""
    with simulator("H100-80GB"):
        q = torch.empty(B, H, T, 64, device="cuda", dtype=bf16, requires_grad=True)
        assert name in _nodes(F.scaled_dot_product_attention(q, q, q, dropout_p=dropout))


@pytest.mark.parametrize(("said", "name"), [("1", FLASH), ("0", CUDNN)])
def test_cudnns_attention_is_left_out_where_the_environment_says_so(monkeypatch, said, name):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", said)
    with simulator("H100-80GB"):
        q = torch.empty(B, H, T, 64, device="cuda", dtype=bf16, requires_grad=True)
        assert name in _nodes(F.scaled_dot_product_attention(q, q, q))
