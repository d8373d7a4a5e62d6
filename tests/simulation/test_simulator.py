"""`lab.simulator`: scripts written for "cuda" run on a machine without it, and torch is as it was afterwards."""


import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

VOCAB, T = 50257, 128


def gpt2(layers: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, bos_token_id=None, eos_token_id=None, use_cache=False)
    return GPT2LMHeadModel(config)


# ---- scripts as people write them


def test_plain_training_loop_holds_weights_gradients_and_two_moments():
    with simulator("T4") as sim:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = gpt2().to(device)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        loaded = torch.cuda.memory_allocated()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            ids = torch.randint(0, VOCAB, (2, T), device=device)
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        del loss, ids
        assert ids_device_is_shown(model)
    assert 0 <= loaded - size < 0.01 * size  # blocks are multiples of 512 B
    assert sim.allocated == pytest.approx(4 * size + 2 * sim.gpu.cublas_workspace, rel=0.01)
    assert sim.peak_allocated > sim.allocated
    assert sim.peak_reserved >= sim.peak_allocated


def ids_device_is_shown(model: nn.Module) -> bool:
    weight = next(model.parameters())
    return weight.is_cuda and str(weight.device) == "cuda:0" and weight.device == torch.device("cuda", 0)


def test_autocast_with_grad_scaler_and_a_pinning_data_loader_steps_the_optimizer():
    with simulator("T4") as sim:
        loader = DataLoader(TensorDataset(torch.randint(0, VOCAB, (12, T))), batch_size=4, shuffle=True,
                            pin_memory=True, num_workers=2)  # fmt: skip
        model = gpt2().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        total = 0.0
        for (ids,) in loader:
            assert not ids.is_cuda
            ids = ids.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(input_ids=ids, labels=ids)
            assert torch.is_autocast_enabled() is False
            assert out.logits.dtype == torch.float16
            scaler.scale(out.loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            total += out.loss.item()
        assert len(optimizer.state) == len(list(model.parameters()))  # it did step
        assert scaler.get_scale() == 65536.0
        assert f"{total / len(loader):.2f}" == "?"
    assert sim.peak_allocated > 0


# ---- memory


def test_allocator_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with simulator("T4") as sim:
        x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    assert x.numel() and sim.reserved == 40 << 20  # two pages of 20 MiB, not a segment of 30
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True")
    with pytest.raises(SpecError, match="expandable_segment'"), simulator("T4"):
        pass
    assert not torch.cuda.is_available()


# ---- what the GPU says of itself


def test_the_host_is_real():
    with simulator("T4"):
        assert torch.arange(10).sum().item() == 45
        assert torch.randperm(5).sort().values.tolist() == [0, 1, 2, 3, 4]


def test_an_optimizer_whose_states_stayed_on_the_host_does_not_step():
    with simulator("T4"):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.cuda()(torch.ones(2, 4, device="cuda")).sum().backward()
        with pytest.raises(RuntimeError, match="same device"):
            optimizer.step()


def test_lists_may_lie_on_both_where_each_operation_has_one_device():
    with simulator("T4"):
        card, host = torch.ones(3, device="cuda"), torch.ones(3)
        torch._foreach_mul_([card, host], [card, host])
        torch._foreach_copy_([card, host], [host, card])
        assert [each.is_cuda for each in torch._foreach_mul([card, host], [torch.tensor(2.0)] * 2)] == [True, False]


# ---- values


def test_what_holds_no_simulated_tensor_is_saved_for_real(tmp_path):
    with simulator("T4"):
        torch.save({"step": 3, "x": torch.arange(4)}, tmp_path / "step.pt")
    assert torch.load(tmp_path / "step.pt")["x"].tolist() == [0, 1, 2, 3]


# ---- nothing stays


def test_bad_cards_are_refused():
    with pytest.raises(UnknownName), simulator("T5"):
        pass
    with pytest.raises(NotAvailable, match="CUDA"), simulator("MI300X"):
        pass
