"""Muon for the matrices of blocks, AdamW for all else: states, temporaries and FLOP, formula beside torch's own."""

import pytest
import torch

import llmlab as lab
from llmlab.formulas import newton_schulz
from llmlab.formulas.memory.states import states
from llmlab.step.optimizer import MuonWithAdamW, in_blocks
from llmlab.step.step import build_step, texts

# Narrow: a CPU without bf16 instructions takes a minute for Newton and Schulz's steps of wide matrices.
GPT = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
       "activation_function": "gelu", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 2048, "vocab_size": 4096, "max_position_embeddings": 512,
         "tie_word_embeddings": False}  # fmt: skip
NARROW = {**LLAMA, "hidden_size": 64, "intermediate_size": 256}
EXPERTS = {"model_type": "mixtral", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
           "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512,
           "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip


@pytest.mark.parametrize("model", [GPT, NARROW, EXPERTS], ids=("gpt", "llama", "experts"))
def test_a_matrix_of_a_block_has_one_state_and_everything_else_two(model):
    run = lab.Training(seq_len=16, optimizer="muon")
    step = build_step(lab.model(model), run, "cpu", texts(lab.model(model), run))
    step()
    assert isinstance(step.optimizer, MuonWithAdamW)
    held = [value for state in step.optimizer.state.values() for value in state.values() if value.ndim]
    assert sum(each.numel() * each.element_size() for each in held) == states(lab.model(model), run).optimizer
    muon, adamw = ({p for group in each.param_groups for p in group["params"]} for each in step.optimizer.both)
    assert {p.ndim for p in muon} == {2} and muon | adamw == set(step.model.parameters())
    assert in_blocks(step.model).count(True) == len(muon)
    assert sum(p.numel() for p in muon) == newton_schulz.elements(lab.model(model), lab.model(model).layers)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast-bf16", "mixed-bf16"])
@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=("llama", "experts"))
def test_the_update_peaks_where_the_formula_says(model, precision):
    run = lab.Training(seq_len=64, precision=precision, optimizer="muon")
    estimated, simulated = (verb(model, run, "A100-40GB") for verb in (lab.estimate, lab.simulate))
    assert estimated.phases["optimizer"] == pytest.approx(simulated.phases["optimizer"], rel=0.03)
    assert estimated.flops == simulated.flops  # torch's FlopCounterMode
    adamw = lab.estimate(model, lab.Training(seq_len=64, precision=precision), "A100-40GB")
    assert estimated.flops - adamw.flops == newton_schulz.flop(lab.model(model))


def test_every_copy_makes_every_matrix_orthogonal():
    spec = lab.model("gpt2")
    one, two = (lab.estimate("gpt2", lab.Training(dp=n, optimizer="muon"), "A100-40GB") for n in (1, 2))
    assert one.flops == two.flops  # of a device
    assert one.time["optimizer"] == pytest.approx(two.time["optimizer"])
    products = 5 * sum(2 * m * n * k * count for rows, columns, count in newton_schulz.matrices(spec)
                       for m, n, k in newton_schulz.products(rows, columns))  # fmt: skip
    least = products / lab.gpu("A100-40GB").peak("bf16")
    assert one.time["optimizer"] > lab.estimate("gpt2", lab.Training(), "A100-40GB").time["optimizer"] * 0.5 + least


def test_it_trains():
    run = lab.Training(micro_batch=4, seq_len=32, optimizer="muon")
    torch.manual_seed(0)
    step = build_step(lab.model(GPT), run, "cpu", texts(lab.model(GPT), run))
    for group in step.optimizer.param_groups:
        group["lr"] = 3e-3

    def loss():
        with torch.no_grad():
            return step.model(input_ids=step.inputs[0], labels=step.inputs[0]).loss.item()

    before = loss()
    for _ in range(5):
        step()
    assert loss() < before - 0.5


@pytest.mark.parametrize("fields", [
    {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"lora": lab.LoRA()}, {"offload": "optimizer", "zero": 1},
])  # fmt: skip
def test_what_cuts_matrices_up_is_refused_by_name(fields):
    with pytest.raises(lab.SpecError, match=f"optimizer='muon' with .*{list(fields)[-1]}"):
        lab.Training(optimizer="muon", **fields)
