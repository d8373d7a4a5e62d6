"""QLoRA is LoRA on the dequantized base, which never changes."""

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.quantize.formats import nf4
from llmlab.course.techniques.lora import adapters, inject
from llmlab.course.techniques.qlora import to_nf4
from llmlab.course.techniques.training_loop import SMALL_LLAMA, next_token_loss

TINY = {**SMALL_LLAMA, "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
LORA = lab.LoRA(rank=4, targets=("q_proj", "o_proj", "down_proj"))
IDS = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(1))


def build():
    torch.manual_seed(0)
    return Llama.from_spec(TINY)


def rounded():
    """The same model with every linear but the head rounded to NF4 and back, by the format from scratch."""
    model = build()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = nf4.decode(*nf4.encode(module.weight.data), module.weight.shape)
    return model


def with_adapters(model):
    inject(model, LORA)
    torch.manual_seed(2)
    for layer in adapters(model).values():
        nn.init.normal_(layer.A, std=0.1)
        nn.init.normal_(layer.B, std=0.1)
    return model


def test_it_is_lora_on_the_dequantized_base_in_outputs_and_gradients():
    ours, oracle = with_adapters(to_nf4(build())), with_adapters(rounded())
    torch.testing.assert_close(ours(IDS), oracle(IDS), rtol=1e-4, atol=1e-4)
    for model in (ours, oracle):
        next_token_loss(model(IDS), IDS).backward()
    for name, layer in adapters(ours).items():
        twin = adapters(oracle)[name]
        torch.testing.assert_close(layer.A.grad, twin.A.grad, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(layer.B.grad, twin.B.grad, rtol=1e-3, atol=1e-6)
    assert not torch.equal(oracle(IDS), with_adapters(build())(IDS)), "or nothing was rounded"


def test_an_evaluation_before_training_changes_no_gradient():
    """bitsandbytes repacks weights for inference on some CPUs, and loses the gradient of what is below."""
    gradients = []
    for evaluated in (False, True):
        model = with_adapters(to_nf4(build()))
        if evaluated:
            with torch.no_grad():
                model.eval()(IDS)
        next_token_loss(model.train()(IDS), IDS).backward()
        gradients.append([layer.A.grad for layer in adapters(model).values()])
    for before, after in zip(*gradients, strict=True):
        torch.testing.assert_close(after, before)


def test_the_base_is_half_a_byte_a_weight_and_does_not_change():
    model = with_adapters(to_nf4(build()))
    before = {name: layer.base.weight.data.clone() for name, layer in adapters(model).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    first = next_token_loss(model(IDS), IDS)
    for _ in range(5):
        optimizer.zero_grad()
        loss = next_token_loss(model(IDS), IDS)
        loss.backward()
        optimizer.step()
    assert loss < first
    for name, layer in adapters(model).items():
        assert torch.equal(layer.base.weight.data, before[name])
        assert layer.base.weight.nbytes * 2 == layer.base.in_features * layer.base.out_features
    assert model.embed_tokens.weight.dtype == model.lm_head.weight.dtype == torch.float32


def test_double_quantization_quantizes_the_scales():
    one, two = (to_nf4(build(), double).layers[0].mlp.down_proj.weight.quant_state for double in (False, True))
    assert one.absmax.dtype == torch.float32 and two.absmax.dtype == torch.uint8 and two.nested
    codes, outer, offset = nf4.double_encode(one.absmax)
    assert torch.equal(codes, two.absmax) and torch.equal(outer, two.state2.absmax)
    torch.testing.assert_close(offset, two.offset)


def test_adapters_are_not_quantized():
    with pytest.raises(SpecError, match="before inject"):
        to_nf4(with_adapters(build()))
