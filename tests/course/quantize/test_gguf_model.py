"""A whole Llama in a .gguf file: what transformers reads from it, what it loses, and files that are no whole model."""

import numpy as np
import pytest
import torch

from llmlab import data
from llmlab.base.errors import SpecError
from llmlab.course import quantize
from llmlab.course.architectures.llama import Llama
from llmlab.course.architectures.small import small_ids, small_model, small_tokenizer
from llmlab.course.evaluate.perplexity import perplexity
from llmlab.course.quantize.formats import gguf_file, gguf_model
from llmlab.specs.gguf import file_bytes, stored

TINY = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}  # fmt: skip


def tiny(tied=False):
    torch.manual_seed(0)
    return Llama.from_spec({**TINY, "tie_word_embeddings": tied}).eval()


@pytest.mark.parametrize(("tied", "mix"), [(False, "F32"), (True, "Q8_0")])
def test_transformers_reads_the_file_as_the_same_model(tmp_path, tied, mix):
    """An independent reader: it puts the rows of q and k back, and cuts the text with the file's own tokenizer."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = tiny(tied), data.tokenizer(300)
    gguf_model.write_llama(tmp_path / "tiny.gguf", model, tokenizer, mix)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf").eval()
    text = "def f(x):\n    return x  # don't, 3.14 → ü"
    ids = tokenizer.encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")(text)["input_ids"] == ids
    ours = gguf_model.read_llama(tmp_path / "tiny.gguf")
    ids = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
        if mix == "F32":
            assert torch.equal(ours(ids), model(ids))


def test_channels_that_turn_together_become_neighbours():
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four channels
    moved = gguf_model.to_neighbours(rows, 2)
    assert moved[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    np.testing.assert_array_equal(gguf_model.to_halves(moved, 2), rows)


@pytest.mark.parametrize("mix", gguf_model.FILE_TYPES)
def test_the_small_model_keeps_its_perplexity_and_its_file_is_as_long_as_the_formula_says(tmp_path, mix):
    model, ids, path = small_model(), small_ids()[1][:2048], tmp_path / "small.gguf"
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    gguf_model.write_llama(path, model, small_tokenizer(), mix)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    back = gguf_model.read_llama(path)
    exact, read = perplexity(model, ids, 512, 512), perplexity(back, ids, 512, 512)
    off = {"F32": 1e-5, "F16": 1e-3, "Q8_0": 3e-3, "Q6_K": 0.01}.get(mix, 0.06)
    assert read == pytest.approx(exact, rel=off)
    file = gguf_file.read(path)
    kinds = {tensor.name: tensor.kind for tensor in stored(model.spec, mix)}
    assert file.tensors["blk.1.ffn_down.weight"].kind == kinds["blk.1.ffn_down"]
    tensors = sum(-(-len(tensor.data) // 32) * 32 for tensor in file.tensors.values())
    header = path.stat().st_size - tensors
    assert quantize.file_bytes(model.spec, mix, header) == path.stat().st_size
    assert header < 32_768 and file_bytes(model.spec, mix, 0) == tensors


def test_a_file_that_is_no_whole_model_is_refused(tmp_path):
    path = tmp_path / "part.gguf"
    gguf_model.write_llama(path, tiny(), data.tokenizer(300))
    whole = gguf_file.read(path)
    arrays = {name: tensor.decode() for name, tensor in whole.tensors.items()}

    def rewritten(arch="llama", metadata=whole.metadata, drop=""):
        kept = {key: value for key, value in metadata.items() if key != "general.architecture"}
        gguf_file.write(path, {name: x for name, x in arrays.items() if name != drop}, "F32", arch, kept)
        return path

    with pytest.raises(SpecError, match=r"lacks tensor 'blk\.1\.ffn_up\.weight'"):
        gguf_model.read_llama(rewritten(drop="blk.1.ffn_up.weight"))
    with pytest.raises(SpecError, match="'gpt2' model"):
        gguf_model.read_llama(rewritten(arch="gpt2"))
    with pytest.raises(SpecError, match="lacks 'block_count'"):
        gguf_model.read_llama(rewritten(metadata={k: v for k, v in whole.metadata.items() if "block" not in k}))
    with pytest.raises(SpecError, match="truncated"):
        data_ = rewritten().read_bytes()
        path.write_bytes(data_[: len(data_) // 2])
        gguf_model.read_llama(path)


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    path = tmp_path / "none.gguf"
    scaled = tiny()
    scaled.rope = {**scaled.rope, "rope_type": "llama3"}
    broken = tiny()
    broken.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    for model, tokenizer, mix, says in (
        (tiny(), data.tokenizer(300), "Q2_K", "mix='Q2_K' is not written"),
        (tiny(), data.tokenizer(512), "Q8_0", "a tokenizer of 512 BPE entries for a model of 300"),
        (scaled, data.tokenizer(300), "Q8_0", "scales its RoPE"),
        (broken, data.tokenizer(300), "Q8_0", "holds 1 nan"),
    ):
        with pytest.raises(SpecError, match=says):
            gguf_model.write_llama(path, model, tokenizer, mix)
        assert not path.exists()
