"""The memory of a compiled step, and of Liger's kernels: what one kernel for several operators does not keep."""

import pytest

import llmlab as lab
from llmlab import Training
from llmlab.formulas.memory.activations import block_saved
from llmlab.formulas.memory.moments import training_moments
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.report import assessed

A100 = lab.gpu("A100-80GB")
GPT = {"model_type": "gpt2", "n_layer": 2, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 2048,
       "activation_function": "gelu_new", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
# Few words: the peak is in a block.
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
         "num_key_value_heads": 2, "intermediate_size": 2048, "max_position_embeddings": 2048, "vocab_size": 512,
         "tie_word_embeddings": False}  # fmt: skip
# pytorch/ao at 9acc9a4d, benchmarks/quantized_training/pretrain_llama2.py, "1B"; its README says 19.47 GB.
TORCHAO = {"model_type": "llama", "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
           "num_key_value_heads": 24, "intermediate_size": 6144, "max_position_embeddings": 2048, "vocab_size": 32_000,
           "tie_word_embeddings": False}  # fmt: skip


ALL = lab.LoRA(8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
ONE = {**LLAMA, "num_hidden_layers": 1}  # half as much to compile
TIED = {**LLAMA, "vocab_size": 65_536, "tie_word_embeddings": True}
EAGER = {"precision": "bf16", "attention": "eager", "micro_batch": 4}
FLASH = {**EAGER, "attention": "flash", "checkpointing": "full"}
GEMMA = {**LLAMA, "model_type": "gemma2", "head_dim": 64, "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 64}
ACCUMULATED = {"precision": "autocast-bf16", "accumulation": 2, "optimizer": "sgd", "micro_batch": 1, "seq_len": 256}


@pytest.mark.parametrize(
    "model, run, gpu, far",
    [
        (GPT, {"precision": "autocast-bf16"}, "A100-80GB", 0.03),
        (LLAMA, {"precision": "bf16"}, "A100-80GB", 0.05),
        (LLAMA, {"precision": "bf16", "checkpointing": "full"}, "A100-80GB", 0.05),  # a mask of all heads
        (LLAMA, {"precision": "bf16", "checkpointing": "full"}, "H100", 0.03),  # one that is kept
        (ONE, {"precision": "bf16", "lora": lab.LoRA(8)}, "A100-80GB", 0.03),
        (LLAMA, {"precision": "bf16", "lora": lab.LoRA(8, targets=("down_proj",))}, "A100-80GB", 0.03),
        (ONE, {"precision": "bf16", "attention": "eager", "micro_batch": 8}, "A100-80GB", 0.03),
        (GEMMA, EAGER, "A100-80GB", 0.02),  # the first block saves no input of softmax
        (LLAMA, {**EAGER, "checkpointing": "full"}, "A100-80GB", 0.04),  # the output of softmax in fp32
        (LLAMA, {**EAGER, "checkpointing": "selective"}, "A100-80GB", 0.03),
        (TIED, {"precision": "bf16", "checkpointing": "full", "micro_batch": 1}, "A100-80GB", 0.03),  # its head last
        (LLAMA, {"precision": "bf16", "checkpointing": "selective"}, "A100-80GB", 0.01),  # keys of all heads
        ({**TIED, "vocab_size": 8192}, FLASH, "H100", 0.03),  # a graph break between the embedding and the head
        (LLAMA, {"precision": "bf16", "checkpointing": "full", "lora": ALL}, "H100", 0.05),
        (QWEN3, {"precision": "bf16"}, "A100-80GB", 0.05),  # norms of queries and keys
        (TIED, ACCUMULATED, "A100-80GB", 0.02),  # a graph's gradients beside earlier ones, of a tied head two and a sum
    ],
)
@pytest.mark.filterwarnings("ignore:.*TensorFloat32")
def test_a_compiled_step_is_counted_as_inductor_compiles_it(model, run, gpu, far):
    pytest.importorskip("triton")
    run = Training(**{"micro_batch": 16, "seq_len": 1024, "compile": True, **run})
    simulated = lab.simulate(model, run, gpu)
    assert not [note for note in simulated.notes if note.code == "ran-eager"]
    assert lab.estimate(model, run, gpu).peak_allocated == pytest.approx(simulated.peak_allocated, rel=far)


def test_a_published_peak_of_a_step_that_is_compiled_with_its_loss():
    """Blocks' inputs, the states, and two copies of the logits: nothing of a loss in fp32."""
    run = Training(32, 2048, "bf16", checkpointing="full", compile=True, attention="flash", kernels="fused-loss")
    moments = {each.name: each.total for each in training_moments(lab.model(TORCHAO), run, None)}
    assert moments["the gradient of the logits"] == pytest.approx(19.47e9, rel=0.01)


def kept(run, model=LLAMA):
    return {(each.kind, each.bytes) for each in block_saved(share_of(lab.model(model), run, A100))}


def moments(model=LLAMA, gpu=A100, **given):
    run = Training(**{"micro_batch": 8, "seq_len": 1024, "precision": "bf16", "compile": True, **given})
    return {each.name: each.total for each in training_moments(lab.model(model), run, gpu)}


def test_from_hopper_on_the_mask_is_kept_and_before_it_backward_writes_it_for_all_heads():
    mask, hopper = 8 * 2048**2 * 2, lab.gpu("H100")
    kept, made = (moments(gpu=gpu, checkpointing="full", seq_len=2048) for gpu in (hopper, A100))
    workspaces = 2 * (hopper.cublas_workspace - A100.cublas_workspace)
    assert kept["the loss"] - workspaces - made["the loss"] == mask
    assert made["the first block of backward"] - kept["the first block of backward"] + workspaces > 3 * mask
    assert made["the last block of backward"] < kept["the last block of backward"]  # the graph writes it once


def test_an_odd_vocabulary_is_padded_for_the_heads_products():
    """GPT-2's 50,257 words: a copy of the logits more, in half precision; of a frozen head the one product that there
    is reads a padded gradient."""
    for lora, copies in ((None, 4), (lab.LoRA(8, targets=("c_attn",)), 3)):
        run = Training(8, 1024, "bf16", compile=True, lora=lora)
        aligned, odd = ({**GPT, "vocab_size": words} for words in (50_304, 50_257))
        assert logits_at("the gradient of the logits", aligned, run) == 3 * 2 * run.tokens * 50_304
        assert logits_at("the gradient of the logits", odd, run) == copies * 2 * run.tokens * 50_257


def test_a_tied_heads_gradient_comes_last_and_the_logits_gradient_waits_for_it():
    """Not under autocast, nor where it is frozen: there the logits alone are left."""
    T, V, last = 8 * 1024, TIED["vocab_size"], "the embedding's gradient"
    for given, logits in (({}, 2), ({"precision": "autocast-bf16"}, 1), ({"lora": lab.LoRA(8)}, 1)):
        run = Training(**{"micro_batch": 8, "seq_len": 1024, "precision": "bf16", "compile": True, **given})
        found = {each.name: each.parts for each in training_moments(lab.model(TIED), run, A100)}
        assert found[last]["logits"] == logits * 2 * T * V
        assert (found["the head's gradient"]["gradients"] > 0) == (run.precision == "autocast-bf16")


def logits_at(name, model, run):
    return {each.name: each.parts["logits"] for each in training_moments(lab.model(model), run, A100)}[name]


def test_what_is_counted_compiled_can_be_out_of_memory_and_what_is_counted_eager_cannot():
    run = Training(64, 2048, "bf16", compile=True)
    assert assessed("Llama-3.2-1B", run, "A100-40GB", None)[0].outcome == "out of memory"
    quantized = Training(64, 2048, "bf16", compile=True, lora=lab.LoRA(8), quantization="nf4")
    report, fit = assessed("Llama-3.2-1B", quantized, "A100-40GB", None)
    assert fit.outcome == "out of memory" and report.outcome == "unknown"
