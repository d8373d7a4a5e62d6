"""The step that measure runs is the step its users run: held to transformers, torch and peft themselves."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.course.techniques.precision import MasterWeights
from llmlab.step.step import build_step, generate, texts, training_step

CONFIGS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 500,
             "bos_token_id": 0, "eos_token_id": 0},
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 64,
              "tie_word_embeddings": True},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def step_of(name, seed=0, inputs=None, recomputing=None, **fields):
    spec, run = lab.model(CONFIGS[name]), lab.Training(**{"micro_batch": 2, "seq_len": 32, **fields})
    torch.manual_seed(seed)
    more = {} if recomputing is None else {"recomputing": recomputing}
    return build_step(spec, run, "cpu", inputs or texts(spec, run), **more)


def gradients_of(step):
    """Run a step and return each parameter's gradient as backward left it."""
    kept = {}

    def enter(phase, **_):
        if phase == "optimizer" and not kept:
            kept.update({n: p.grad.clone() for n, p in step.model.named_parameters() if p.grad is not None})

    torch.manual_seed(1)  # of dropout
    training_step(step, enter)
    return kept


def test_phases_come_in_the_order_of_a_training_loop():
    phases = []
    training_step(step_of("gpt2", accumulation=2), lambda phase, **_: phases.append(phase))
    assert phases == ["forward", "backward", "forward", "backward", "optimizer", "optimizer"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_step_is_the_plain_loop_with_transformers_and_torch(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    ours = step_of(name, attention="eager")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]), attn_implementation="eager")
    model.load_state_dict(ours.model.state_dict())
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(1)
    model(input_ids=ours.inputs[0], labels=ours.inputs[0]).loss.backward()
    optimizer.step()
    torch.manual_seed(1)
    ours()
    theirs = dict(model.named_parameters())
    for key, parameter in ours.model.named_parameters():
        assert torch.equal(parameter, theirs[key]), key
        assert parameter.grad is None


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_changes_no_gradient_dropout_included(name, kind):
    plain, checkpointed = gradients_of(step_of(name)), gradients_of(step_of(name, checkpointing=kind))
    assert plain.keys() == checkpointed.keys()
    for key, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[key]), key


def test_every_block_is_recomputed_once():
    count = []

    @contextmanager
    def counting():
        count.append(1)
        yield

    for kind in ("full", "selective"):
        count.clear()
        training_step(step_of("llama", checkpointing=kind, recomputing=counting))
        assert len(count) == 2


def test_accumulated_micro_batches_give_the_gradient_of_the_batch():
    one = step_of("llama", micro_batch=4)
    two = step_of("llama", micro_batch=2, accumulation=2, inputs=list(one.inputs[0].split(2)))
    whole, summed = gradients_of(one), gradients_of(two)
    for key, gradient in whole.items():
        torch.testing.assert_close(summed[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "weights", "gradients", "states"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16, torch.float16),
        ("autocast-bf16", torch.float32, torch.float32, torch.float32),
        ("autocast-fp16", torch.float32, torch.float32, torch.float32),
        ("mixed-bf16", torch.bfloat16, torch.bfloat16, torch.float32),
        ("mixed-fp16", torch.float16, torch.float16, torch.float32),
    ],
)
def test_a_precision_says_which_tensors_are_in_which_dtype(precision, weights, gradients, states):
    step = step_of("llama", precision=precision)
    assert {g.dtype for g in gradients_of(step).values()} == {gradients}
    assert {p.dtype for p in step.model.parameters()} == {weights}
    assert {state["exp_avg"].dtype for state in step.optimizer.state.values()} == {states}


def test_autocast_multiplies_in_half_and_returns_fp32_gradients():
    step, seen = step_of("llama", precision="autocast-bf16"), []
    step.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: seen.append(args[-1].dtype))
    step()
    assert seen == [torch.bfloat16]


def test_masters_take_and_free_half_gradients_and_leave_fp32_parameters_alone():
    half, full = nn.Parameter(torch.ones(3, dtype=torch.float16)), nn.Parameter(torch.ones(3))
    masters = MasterWeights([half, full])
    half.grad = torch.full((3,), 0.5, dtype=torch.float16)
    masters.copy_gradients()
    assert half.grad is None
    assert masters.parameters[0].grad.dtype == torch.float32 and masters.parameters[1] is full


@pytest.mark.parametrize(("optimizer", "precision"), [
    *((optimizer, "bf16") for optimizer in ("sgd", "adamw", "adamw-fused", "adamw-8bit", "adafactor", "lion")),
    *(("adamw", precision) for precision in ("fp32", "autocast-bf16", "autocast-fp16", "mixed-fp16")),
    ("lion", "mixed-bf16"),
])  # fmt: skip
def test_every_optimizer_lowers_the_loss_and_so_does_every_precision(optimizer, precision, monkeypatch):
    rates = {"sgd": 0.5, "adafactor": 0.03}
    monkeypatch.setattr("llmlab.step.optimizer.LEARNING_RATE", rates.get(optimizer, 3e-3))
    step = step_of("llama", optimizer=optimizer, precision=precision)
    losses = [loss_of(step)]
    for _ in range(12):
        step()
    losses.append(loss_of(step))
    assert losses[1] < losses[0] - 0.05


def test_master_copies_and_adamw_fused_are_stepped_by_torchs_one_kernel():
    fused = {"fp32": False, "mixed-bf16": True}
    for precision, masters in fused.items():
        for name, asked in (("adamw", False), ("adamw-fused", True)):
            step = step_of("llama", optimizer=name, precision=precision)
            assert bool(step.optimizer.defaults["fused"]) is (asked or masters)


@torch.no_grad()
def loss_of(step):
    return step.model(input_ids=step.inputs[0], labels=step.inputs[0]).loss.item()


@pytest.mark.parametrize("checkpointing", [None, "full"])
@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_lora_trains_its_adapters_only_and_they_are_fp32(quantization, checkpointing):
    lora = lab.LoRA(rank=4, targets=("q_proj", "v_proj"))
    step = step_of("llama", precision="bf16", lora=lora, quantization=quantization, checkpointing=checkpointing)
    gradients = gradients_of(step)
    assert len(gradients) == 2 * 2 * 2 and all("lora_" in name for name in gradients)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert any(gradient.abs().sum() > 0 for gradient in gradients.values())


def test_lora_finds_gpt2s_transposed_linears():
    step = step_of("gpt2", lora=lab.LoRA(rank=4, targets=("c_attn",)))
    assert sum(gradient.numel() for gradient in gradients_of(step).values()) == 2 * 4 * (64 + 3 * 64)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_gives_transformers_own_greedy_tokens(name):
    spec, run = lab.model(CONFIGS[name]), lab.Inference(batch=2, prompt_len=20, new_tokens=6, weights="fp32", kv="fp32")
    torch.manual_seed(0)
    step = build_step(spec, run, "cpu", texts(spec, run))
    ours = generate(step)
    theirs = step.model.generate(
        step.inputs[0], attention_mask=torch.ones_like(step.inputs[0]), do_sample=False, max_new_tokens=6,
        min_new_tokens=6, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(ours, theirs[:, 20:])


def test_a_cache_in_another_dtype_than_the_products_is_refused():
    spec = lab.model(CONFIGS["llama"])
    with pytest.raises(lab.NotAvailable, match="give kv='fp32'"):
        build_step(spec, lab.Inference(weights="fp32", kv="bf16"), "cpu", [])
    with pytest.raises(lab.NotAvailable, match="give kv='bf16'"):
        build_step(spec, lab.Inference(weights="nf4", kv="fp16"), "cpu", [])


def test_zero_on_one_gpu_cuts_nothing_of_what_is_offloaded():
    """DeepSpeed offloads with ZeRO only, so a run for one GPU names a stage; it takes the same bytes."""
    run = {"seq_len": 32, "precision": "mixed-bf16", "offload": "optimizer"}
    plain, staged = (lab.simulate(CONFIGS["llama"], lab.Training(**run, zero=stage), "A100-80GB") for stage in (0, 2))
    assert staged.peak_reserved == plain.peak_reserved and staged.phases == plain.phases
    with pytest.raises(lab.NotAvailable, match="dp=2, zero=2 needs several"):
        step_of("llama", dp=2, zero=2)
