"""llama.cpp, given our weights in its own file format, writes our tokens. Needs llama-cpp-python, which builds it."""

import pytest
import torch

from llmlab.course.architectures.small import small_ids, small_model, small_tokenizer
from llmlab.course.inference import generate
from llmlab.course.quantize.formats.gguf_model import write_llama

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is optional")


@pytest.mark.parametrize("mix", ["F32", "F16"])  # F16: the weights are kept in half precision, so it loses nothing
def test_llama_cpp_writes_the_tokens_of_our_decoder(mix: str, tmp_path) -> None:
    model, tokenizer, (_, text) = small_model(), small_tokenizer(), small_ids()
    write_llama(tmp_path / "model.gguf", model, tokenizer, mix)
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=256, n_threads=1, verbose=False)
    for begin in (0, 3000, 9000):
        prompt = text[begin : begin + 40]
        theirs = []
        for token in engine.generate(prompt.tolist(), temp=0.0, repeat_penalty=1.0):
            theirs.append(token)
            if len(theirs) == 40:
                break
        assert theirs == generate(model, prompt, 40)[40:].tolist()
    engine.close()


def test_llama_cpp_cuts_text_as_our_tokenizer_does(tmp_path) -> None:
    tokenizer = small_tokenizer()
    write_llama(tmp_path / "model.gguf", small_model(), tokenizer, "F16")
    engine = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, verbose=False, vocab_only=True)
    for text in ("The with statement", "x = [1, 2]\n    return  x", "naïve café — 東京", "don't  123"):
        assert engine.tokenize(text.encode(), add_bos=False) == tokenizer.encode(text).ids
        assert torch.tensor(tokenizer.encode(text).ids).max() < 1024
    engine.close()
