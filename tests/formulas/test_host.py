"""The operators of a block that formulas count, beside the simulator's log of the real classes."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import llmlab as lab
from llmlab import LoRA, Training
from llmlab.archive import figure, records
from llmlab.archive.store import PACKAGE
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.elementwise import moved
from llmlab.formulas.time.host import (
    GENERATING,
    GENERATING_ENDS,
    GENERATING_NORM,
    TRANSFORMERS_ENDS,
    Operators,
    _fsdp_operators,
    compiled_kernels,
    generation_host_seconds,
    hook_modules,
    hook_seconds,
    host_seconds,
    operators,
    python_seconds,
    started,
    summed,
    trained,
)
from llmlab.formulas.time.step import token_seconds
from llmlab.simulation.report import recorded

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "vocab_size": 512, "n_positions": 512}
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUN = Training(seq_len=64, precision="mixed-bf16")


@cache
def log(model, run):
    """Return the operators of a step; `model`: its config in JSON."""
    return tuple(recorded(json.loads(model), run, "A100-80GB").operators)


def deep(model, layers):
    return {**model, "n_layer" if model["model_type"] == "gpt2" else "num_hidden_layers": layers}


def logged(model, run, depths=(1, 2)):
    """Return the operators of a step of one block, and of two."""
    return [log(json.dumps(deep(model, layers)), run) for layers in depths]


def counted(model, run, depths=(1, 2)):
    """Return the operators that one more block adds to the passes."""
    few, many = (Counter((bool(k.backward), k.kind == "none") for k in log if k.phase != "optimizer")
                 for log in logged(model, run, depths))  # fmt: skip
    keys = (False, False), (False, True), (True, False), (True, True)
    return Operators(*((many[key] - few[key]) / (depths[1] - depths[0]) for key in keys))


def formula(model, run):
    """Return the operators of a block by the formulas, with those of adapters and without those outside blocks."""
    few, many = (started(lab.model(deep(model, layers)), run) for layers in (1, 2))
    return many.plus(few.times(-1))


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("zero", [2, 3])
def test_fsdp2_adds_operators_for_each_unit_and_each_parameter(model, zero):
    run, keys = replace(RUN, optimizer="sgd"), [(back, view) for back in (False, True) for view in (False, True)]
    ranks = replace(run, dp=8, zero=zero)
    few, many = (Counter((bool(k.backward), k.kind == "none") for k in log(json.dumps(deep(model, 3)), each)
                         if k.phase != "optimizer") for each in (run, ranks))  # fmt: skip
    more = Operators(*(many[key] - few[key] for key in keys))
    formula = _fsdp_operators(lab.model(deep(model, 3)), ranks)
    assert (formula.kernels, formula.kernels_back) == (more.kernels, more.kernels_back)
    assert formula.views == pytest.approx(more.views, rel=0.1)
    assert formula.views_back == pytest.approx(more.views_back, rel=0.1)


QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 64}
BLOCKS = [
    *((*each, "mixed-bf16", again) for each in ((LLAMA, None), (LLAMA, "fused-norm"), (GPT2, None))
      for again in (None, "full", "selective")),
    (LLAMA, None, "bf16", "full"), (LLAMA, None, "autocast-bf16", "full"), (GPT2, None, "bf16", None),
    (GPT2, None, "autocast-bf16", None), (GPT2, None, "autocast-bf16", "selective"),
    (LLAMA, "fused-norm", "autocast-bf16", "full"), (QWEN3, None, "bf16", "full"), (QWEN3, None, "mixed-bf16", None),
]  # fmt: skip


@pytest.mark.parametrize(("model", "kernels", "precision", "checkpointing"), BLOCKS)
def test_blocks_of_transformers(model, kernels, precision, checkpointing):
    run = replace(RUN, precision=precision, checkpointing=checkpointing, kernels=kernels)
    assert counted(model, run) == operators(lab.model(deep(model, 2)), run)


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 256}  # fmt: skip
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 64}


@pytest.mark.parametrize(("model", "attention"), [(MIXTRAL, "sdpa"), (QWEN3_MOE, "sdpa"), (GEMMA2, "eager")],
                         ids=["mixtral", "qwen3_moe", "gemma2"])  # fmt: skip
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_experts_gemmas_norms_and_softcaps_start_operators(model, attention, checkpointing):
    run, host = replace(RUN, precision="bf16", attention=attention, checkpointing=checkpointing), efficiency("A100")
    found = counted(model, run)
    assert formula(model, run).seconds(host) == pytest.approx(found.seconds(host), rel=0.03)


@pytest.mark.parametrize(("model", "ends"), [(LLAMA, "rmsnorm"), (GPT2, "layernorm")], ids=["llama", "gpt2"])
def test_embedding_last_norm_head_and_loss_start_operators_too(model, ends):
    run, host = replace(RUN, precision="bf16"), efficiency("A100")
    few = logged(model, run)[0]
    whole = Counter((bool(k.backward), k.kind == "none") for k in few if k.phase != "optimizer")
    keys = (False, False), (False, True), (True, False), (True, True)
    outside = Operators(*(whole[key] for key in keys)).plus(formula(model, run).times(-1))
    assert TRANSFORMERS_ENDS[ends].seconds(host) == pytest.approx(outside.seconds(host), rel=0.08)


@pytest.mark.parametrize(("model", "precision"), [
    (MIXTRAL, "bf16"), (MIXTRAL, "autocast-bf16"), (GEMMA2, "bf16"), (QWEN3, "autocast-bf16"),
    ({**LLAMA, "model_type": "phi3", "pad_token_id": 0}, "bf16"),
], ids=["mixtral", "mixtral-autocast", "gemma2", "qwen3-autocast", "phi3"])  # fmt: skip
def test_the_bytes_of_a_block(model, precision):
    """Experts whose weights are fp32 are multiplied in fp32 under autocast; Gemma multiplies by its norms' weights in
    fp32; gate and up that are halves of one tensor have a gradient that is concatenated."""
    run = replace(RUN, micro_batch=4, seq_len=256, precision=precision,
                  attention="eager" if model is GEMMA2 else "sdpa")  # fmt: skip
    few, many = (sum(k.bytes for k in log if k.phase != "optimizer" and k.kind not in ("matmul", "sent")
                     and "attention" not in k.kind) for log in logged(model, run))  # fmt: skip
    one, two = (moved(lab.model(deep(model, layers)), run).blocks for layers in (1, 2))
    assert two - one == pytest.approx(many - few, rel=0.02)


def test_ddp_copies_each_gradient_into_a_bucket_and_back():
    alone, ranks = (sum(k.bytes for k in logged(LLAMA, run)[0]
                        if k.phase != "optimizer" and k.kind not in ("matmul", "sent"))
                    for run in (replace(RUN, precision="bf16"), replace(RUN, precision="bf16", dp=2)))  # fmt: skip
    spec = lab.model(deep(LLAMA, 1))
    assert ranks - alone == pytest.approx(2 * 2 * 2 * spec.parameters, rel=0.01)
    one, two = (moved(spec, replace(RUN, precision="bf16", dp=dp)).blocks for dp in (1, 2))
    assert two - one == 2 * 2 * 2 * spec.parameters


@pytest.mark.parametrize(("kv_heads", "checkpointing"), [(4, None), (2, None), (2, "full")])
def test_scores_that_are_written_out(kv_heads, checkpointing):
    model = {**LLAMA, "num_key_value_heads": kv_heads}
    run = replace(RUN, attention="eager", checkpointing=checkpointing)
    assert counted(model, run) == operators(lab.model({**model, "num_hidden_layers": 2}), run)


@pytest.mark.parametrize("model", ["gpt2-medium", "HuggingFaceTB/SmolLM2-135M", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"])
def test_checkpointing_takes_the_host_as_it_took_one(model):
    """Steps on an H200 that their launches are longer than: the operators that run again explain half of it."""
    steps = [step for step in records(model, source="measured", gpu="H200", folder=PACKAGE)
             if step.run.precision == "autocast-bf16" and step.run.micro_batch == 1]  # fmt: skip
    assert {step.run.checkpointing for step in steps} == {None, "full"}
    for step in steps:
        predicted = lab.estimate(model, step.run, "H200")
        assert "launches" in predicted.time
        assert predicted.step_seconds == pytest.approx(step.step_seconds, rel=0.35)


@pytest.mark.parametrize(("model", "precision"), [(GPT2, "bf16"), (LLAMA, "autocast-bf16")])
def test_a_compiled_block_starts_the_kernels_that_inductor_writes(model, precision):
    run = replace(RUN, precision=precision, compile=True)
    few, many = (sum(k.compiled and k.kind != "none" for k in log) for log in logged(model, run))
    assert many - few == compiled_kernels(lab.model(deep(model, 1)), run)


def test_a_compiled_step_waits_for_its_host_where_the_card_is_quicker():
    """GPT-2's step of one sequence on an H100: 12.5 ms with AdamW in one kernel (Jjschwartz/gollem, experiments/gpt2);
    of 16 the GPU is the slower."""
    run = Training(seq_len=1024, precision="autocast-bf16", attention="flash", compile=True)
    short, long = (lab.estimate("gpt2", replace(run, micro_batch=many), "H100") for many in (1, 16))
    assert "launches" in short.time and "launches" not in long.time
    assert short.step_seconds_high / short.step_seconds > 1.1 * long.step_seconds_high / long.step_seconds
    spec, host = lab.model("gpt2"), efficiency("A100")
    eager, compiled = (host_seconds(spec, replace(run, compile=c), host) for c in (False, True))
    assert 0.2 < compiled / eager < 0.5


@pytest.mark.parametrize(("half", "checkpointing"), [(True, None), (True, "full"), (False, None), (False, "full")])
def test_packed_weights_are_unpacked_by_an_operator_more(half, checkpointing):
    lora = LoRA(rank=4, targets=("q_proj", "v_proj"), autocast_adapter_dtype=not half)
    run = replace(RUN, precision="bf16", lora=lora, quantization="nf4", checkpointing=checkpointing)
    found = counted(LLAMA, run)
    counts = formula(LLAMA, run)
    host = efficiency("A100")
    assert found.seconds(host) == pytest.approx(counts.seconds(host), rel=0.07)


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_adapters(checkpointing, dropout):
    run = replace(RUN, checkpointing=checkpointing, lora=LoRA(rank=4, targets=NAMES, dropout=dropout))
    found, spec = counted(LLAMA, run), lab.model({**LLAMA, "num_hidden_layers": 2})
    assert tuple(found) == pytest.approx(tuple(formula(LLAMA, run)))
    host = efficiency("A100")
    seconds = 2 * found.seconds(host) + TRANSFORMERS_ENDS["rmsnorm"].seconds(host)
    assert host_seconds(spec, run, host) == pytest.approx(seconds + python_seconds(spec, run))


@pytest.mark.parametrize(("model", "targets", "precision", "half", "checkpointing"), [
    (LLAMA, NAMES, "bf16", True, "full"), (LLAMA, ("q_proj", "v_proj"), "bf16", False, None),
    (LLAMA, ("q_proj", "v_proj"), "autocast-bf16", False, "selective"),
    (GPT2, ("c_attn",), "autocast-bf16", False, None), (GPT2, ("c_attn",), "bf16", False, "full"),
])  # fmt: skip
def test_adapters_of_some_layers(model, targets, precision, half, checkpointing):
    """Frozen weights have no gradients; adapters' own dtype decides what is cast."""
    lora = LoRA(rank=4, targets=targets, autocast_adapter_dtype=not half)
    run = replace(RUN, precision=precision, checkpointing=checkpointing, lora=lora)
    found = counted(model, run)
    assert tuple(found) == pytest.approx(tuple(formula(model, run)), abs=1)  # of some hundred


@pytest.mark.parametrize("more", [
    {"lora": LoRA(rank=4, targets=NAMES)}, {"lora": LoRA(rank=4), "checkpointing": "full"}, {"checkpointing": "full"},
])  # fmt: skip
def test_estimate_and_simulate_agree_on_steps_that_wait_for_the_host(more):
    """Both have checkpointing's Python, which no operator starts."""
    run = replace(RUN, precision="bf16", accumulation=3, **more)
    model = {**LLAMA, "num_hidden_layers": 6}
    estimated, simulated = (verb(model, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert min(each.time["launches"] / each.step_seconds for each in (estimated, simulated)) > 0.5
    assert estimated.step_seconds == pytest.approx(simulated.step_seconds, rel=0.08)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4, targets=NAMES)], ids=["all", "adapters"])
def test_each_micro_batch_adds_its_gradients_to_those_before(lora):
    """An operator for each tensor that is trained, from the second micro-batch on."""
    spec, run = lab.model(deep(LLAMA, 2)), replace(RUN, precision="bf16", lora=lora)
    adds = []
    for accumulation in (1, 2):
        kernels = logged(LLAMA, replace(run, accumulation=accumulation))[1]
        adds.append(sum(k.backward and k.kind != "none" for k in kernels if k.phase != "optimizer"))
    assert adds[1] - 2 * adds[0] == summed(spec, replace(run, accumulation=2)) == trained(spec, run)


@pytest.mark.parametrize("checkpointing", [None, "full"])
@pytest.mark.parametrize("half", [False, True])
def test_adapters_dropout_moves_what_the_operators_do(checkpointing, half):
    """Each adapter's input, in the adapter's dtype, and a byte of mask; no operator else moves more for it."""
    lora = LoRA(rank=4, targets=("q_proj", "down_proj"), autocast_adapter_dtype=not half)
    run = replace(RUN, precision="bf16", checkpointing=checkpointing, lora=lora)
    both = [replace(run, lora=replace(lora, dropout=each)) for each in (0.05, 0.0)]
    seen = []
    for each in both:
        few, many = (sum(k.bytes for k in log if k.phase != "optimizer") for log in logged(LLAMA, each))
        seen.append(many - few)
    spec = lab.model(deep(LLAMA, 1))
    formula = [moved(spec, each).blocks for each in both]
    assert seen[0] - seen[1] == pytest.approx(formula[0] - formula[1], rel=0.01)


@pytest.mark.parametrize("zero", [1, 2])
def test_deepspeed_adds_views(zero):
    pytest.importorskip("deepspeed")
    run = replace(RUN, dp=8, zero=zero, stack="deepspeed")
    assert counted(LLAMA, run, depths=(2, 4)) == operators(lab.model({**LLAMA, "num_hidden_layers": 2}), run)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("model", [LLAMA, {**LLAMA, "model_type": "qwen2"}, GPT2], ids=lambda each: each["model_type"])
def test_hooks_of_a_block(model, checkpointing):
    """DeepSpeed hooks every module that is called; each parameter is a module's own, and matrices are what is large."""
    config = {**model, "n_layer" if model is GPT2 else "num_hidden_layers": 2}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    block = next(each for each in network.modules() if type(each).__name__ in ("GPT2Block", "LlamaDecoderLayer",
                                                                             "Qwen2DecoderLayer"))  # fmt: skip
    called = []
    for each in block.modules():
        each.register_forward_pre_hook(lambda module, _: called.append(module))
    ids = torch.zeros(1, 8, dtype=torch.long)
    network.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counted, parameters = hook_modules(lab.model(config)), list(block.parameters())
    # What is computed again stops at the last tensor that backward needs, a module or two before the block's end.
    short = counted.module * (2 if checkpointing else 1) - len(called)
    assert 0 <= short <= (2 if checkpointing else 0)
    assert sum(p.dim() == 2 for p in parameters) == counted.gathered
    assert sum(p.dim() == 1 for p in parameters) == counted.whole


def test_hooks_of_zero_3_take_the_host_and_stage_2_has_none():
    """Python around modules is no operator: a step of ZeRO-3 that its host starts takes longer for it, and nobody can
    know by how much on another host, so its interval is wider."""
    run = replace(RUN, seq_len=256, zero=3, stack="deepspeed")
    steps = {stage: lab.estimate("Qwen/Qwen2.5-0.5B", replace(run, zero=stage), "A100") for stage in (2, 3)}
    assert steps[3].time["launches"] > 2 * steps[2].time["launches"]
    low, high = (getattr(steps[3], f"step_seconds_{end}") / steps[3].step_seconds for end in ("low", "high"))
    assert low < 0.6 and high > 1.9
    spec, host = lab.model("Qwen/Qwen2.5-0.5B"), efficiency("A100")
    assert hook_seconds(spec, replace(run, zero=2), host) == hook_seconds(spec, RUN, host) == 0
    again, once = (hook_seconds(spec, replace(run, checkpointing=each), host) for each in ("full", None))
    assert once < again < 2 * once


def test_a_simulated_step_has_the_hooks_time_too():
    pytest.importorskip("deepspeed")
    model = {**LLAMA, "num_hidden_layers": 2}
    run = replace(RUN, zero=3, stack="deepspeed")
    formula, traced = (verb(model, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert traced.time["launches"] >= 0.9 * hook_seconds(lab.model(model), run, efficiency("A100"))
    assert traced.step_seconds == pytest.approx(formula.step_seconds, rel=0.25)


def test_torchtitan():
    pytest.importorskip("torchtitan")
    run = replace(RUN, dp=8, zero=3, stack="torchtitan:ac=none")
    assert counted(LLAMA, run) == operators(lab.model({**LLAMA, "num_hidden_layers": 2}), run)


# ---- generation


VIEWS = {"view", "_unsafe_view", "transpose", "t", "expand", "slice", "unsqueeze", "select", "alias", "split"}
GENERATED = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
         "max_position_embeddings": 64}  # fmt: skip
GENERATED_GPT2 = {"n_embd": 64, "n_head": 4, "n_positions": 64}


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kernels, self.views = 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in VIEWS:
            self.views += 1
        else:
            self.kernels += 1
        return operator(*args, **(kwargs or {}))


def of_a_token(family, layers):
    """Return the operators that one more token takes in generate()."""
    sizes = {**GENERATED_GPT2, "n_layer": layers} if family == "gpt2" else {**GENERATED, "num_hidden_layers": layers}
    config = AutoConfig.for_model(family, **sizes, vocab_size=64, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids, counts = torch.zeros(1, 4, dtype=torch.long), Counter()
    for new, sign in ((4, -1), (6, 1)):
        with Counting() as found:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=False, pad_token_id=0)  # fmt: skip
        counts["kernels"] += sign * found.kernels
        counts["views"] += sign * found.views
    return Operators(counts["kernels"] / 2, counts["views"] / 2, 0, 0)


@pytest.mark.parametrize(("family", "norm", "more"), [("llama", "rmsnorm", 0), ("qwen2", "rmsnorm", 0),
                                                      ("qwen3", "rmsnorm", 2), ("gpt2", "layernorm", 0)])  # fmt: skip
def test_operators_of_a_token(family, norm, more):
    two, four = of_a_token(family, 2), of_a_token(family, 4)
    block = four.plus(two.times(-1)).times(1 / 2)
    assert block == GENERATING[norm].plus(GENERATING_NORM.times(more))
    assert two.plus(block.times(-2)) == GENERATING_ENDS[norm]


def test_a_generation_of_gpt2_on_an_h200():
    """Nobody timed an H200's host; the A100's stands for it, in training as well."""
    (record,) = [one for one in lab.records("gpt2", gpu="H200") if isinstance(one.run, lab.Inference)]
    predicted = record.run.new_tokens * generation_host_seconds(lab.model("gpt2"), efficiency("A100-80GB"))
    assert predicted == pytest.approx(record.step_seconds, rel=0.15)


def test_a_generation_of_qwen_on_an_a100():
    run = lab.Inference(prompt_len=6144, new_tokens=2048)
    _, each = token_seconds(lab.model("Qwen/Qwen2.5-7B"), run, efficiency("A100-80GB"))
    assert 1 / each == pytest.approx(figure("qwen2.5-7b-generate")["6144"], rel=0.15)
