"""Which operators the simulated GPU knows all about, met by the models that the book and its readers run."""

import pytest
import torch
import torch.nn.functional as F

import llmlab as lab
from llmlab.simulation.simulator import simulator
from llmlab.simulation.workspaces.none import NO_WORKSPACE, has_known_workspace
from llmlab.simulation.workspaces.registry import WORKSPACES
from llmlab.specs.run import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("no_gpu")

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 128}
EXPERTS = {**DECODER, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
MODELS = {
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}, "gemma2": DECODER,
    "qwen2_moe": EXPERTS, "mamba": SIZES,
}  # fmt: skip


def test_each_name_is_an_operators_and_stands_once():
    names = [name for listed in NO_WORKSPACE.values() for name in listed.split()]
    assert len(names) == len(set(names))
    for name in names:
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        assert func.name() not in WORKSPACES and has_known_workspace(func, ()), name


def test_what_takes_more_than_its_outputs_is_stated_by_what_it_takes():
    assert has_known_workspace(torch.ops.aten.topk.default, WORKSPACES)
    assert not has_known_workspace(torch.ops.aten.topk.default, ())
    assert has_known_workspace(torch.ops.aten.view.default, ()) and has_known_workspace(torch.ops.aten.silu.default, ())
    assert not has_known_workspace(torch.ops.aten.im2col.default, WORKSPACES)


def test_what_sorts_its_indices_to_be_deterministic_is_not_known_then():
    add = torch.ops.aten.index_add_.default
    assert has_known_workspace(add, WORKSPACES)
    torch.use_deterministic_algorithms(True)
    try:
        assert not has_known_workspace(add, WORKSPACES)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", MODELS)
def test_a_language_models_step_and_generation_meet_no_operator_that_is_not_known(name):
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    with simulator("A100-40GB") as sim:
        model = transformers.AutoModelForCausalLM.from_config(config).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(3, 250, (2, 32)).cuda()
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.eval().generate(ids, max_new_tokens=2, do_sample=True, top_k=5, top_p=0.9, eos_token_id=2, pad_token_id=0)
    assert [note for note in sim.notes if note.code == "scratch-unknown"] == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_meets_an_operator_that_is_not_known(optimizer):
    for precision in ("fp32", "mixed-bf16"):
        run = lab.Training(seq_len=16, optimizer=optimizer, precision=precision)
        notes = lab.simulate({"model_type": "gpt2", **MODELS["gpt2"]}, run, "A100-40GB").notes
        assert [note for note in notes if note.code == "scratch-unknown"] == []


def test_an_operator_that_is_not_known_is_named():
    with simulator("A100-40GB") as sim:
        F.unfold(torch.zeros(1, 3, 8, 8, device="cuda"), 3)
    (note,) = sim.notes
    assert note.code == "scratch-unknown" and "aten.im2col.default" in note
