"""`lab.simulator`: scripts written for "cuda" run on a machine without it, and torch is as it was afterwards."""

from __future__ import annotations

import json
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import llmlab as lab
from llmlab.base.compat import symbol
from llmlab.base.errors import NotAvailable, SpecError, UnknownName
from llmlab.simulation.simulator import simulator
from llmlab.simulation.values.placeholders import PLACEHOLDER

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

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


def test_checkpointing_holds_less_and_recomputes_code_that_says_cuda():
    from torch.utils.checkpoint import checkpoint

    def block(x):
        mask = torch.ones(x.shape[-1]).cuda()
        return nn.functional.gelu(nn.functional.gelu(x * mask)).tanh()

    def peak(recompute):
        with simulator("A100-40GB") as sim:
            x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            h = x
            for _ in range(6):
                h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
            h.sum().backward()
            assert x.grad.shape == x.shape
        return sim.peak_allocated

    assert peak(True) < 0.6 * peak(False)


def test_a_model_and_optimizer_made_before_the_block_keep_ties_and_get_their_weights_back():
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight
    with simulator("T4") as sim:
        model.cuda()
        assert model[1].weight is model[0].weight
        assert sim.allocated == 100 * 16 * 4 + 256  # 6400 B in blocks of 512 B
        model(torch.zeros(1, dtype=torch.long, device="cuda")).sum().backward()
    assert model[0].weight is weight and model[1].weight is weight
    assert weight.grad is None and torch.isfinite(model(torch.zeros(1, dtype=torch.long))).all()


# ---- memory


def test_statistics_are_those_of_the_caching_allocator():
    with simulator("T4") as sim:
        x = torch.empty(1000, 1000, device="cuda")  # 4 000 000 B: 7813 blocks of 512 B, in a segment of 20 MiB
        assert torch.cuda.memory_allocated() == sim.allocated == 7813 * 512
        assert torch.cuda.memory_reserved() == sim.reserved == 20 << 20
        del x
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0)) == (0, 7813 * 512)
        assert torch.cuda.mem_get_info() == (sim.gpu.memory - sim.gpu.context - (20 << 20), sim.gpu.memory)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats("cuda")
        assert torch.cuda.max_memory_reserved() == torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 1
        assert "CUDA memory summary" in torch.cuda.memory_summary()
    assert sim.timeline == (7813 * 512, 0)


def test_above_capacity_torchs_own_error_says_so_and_a_smaller_batch_goes_on():
    with simulator("T4") as sim:
        tensor = torch.empty(13 << 30, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        message = str(caught.value)
        assert message.startswith("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56")
        assert "of which 1.42 GiB is free." in message
        assert "13.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated" in message
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        del tensor
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert sim.allocated == 0


def test_allocator_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with simulator("T4") as sim:
        x = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    assert x.numel() and sim.reserved == 40 << 20  # two pages of 20 MiB, not a segment of 30
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True")
    with pytest.raises(SpecError, match="expandable_segment'"), simulator("T4"):
        pass
    assert not torch.cuda.is_available()


def test_snapshot_is_what_memory_viz_reads(tmp_path):
    path = tmp_path / "run.pickle"
    with simulator("T4") as sim:
        model = nn.Linear(1000, 1000).cuda()
        model(torch.ones(8, 1000, device="cuda")).sum().backward()
        sim.save_snapshot(path)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "torch.pickle"))
    content = pickle.loads(path.read_bytes())
    assert content == pickle.loads((tmp_path / "torch.pickle").read_bytes())
    assert set(content) >= {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert sum(segment["allocated_size"] for segment in content["segments"]) == sim.allocated
    live = 0
    for entry in content["device_traces"][0]:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
    assert live == sum(segment["requested_size"] for segment in content["segments"])
    from torch.cuda import _memory_viz

    assert "cudaMalloc(" in _memory_viz.trace(content) and "Mi" in _memory_viz.segsum(content)
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    stacks = [block["frames"] for block in blocks if block["state"] == "active_allocated"]
    assert all(any(frame["filename"] == __file__ for frame in stack) for stack in stacks)
    assert list(tmp_path.glob("*.tmp")) == []


# ---- what the GPU says of itself


def test_the_card_answers_for_itself():
    with simulator("A100-40GB") as sim:
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        assert "A100" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties("cuda").total_memory == sim.gpu.memory
        torch.cuda.synchronize()
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.empty(1, device="cuda:1")


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(3, device="cuda"),
    lambda: torch.tensor([1.0, 2.0, 3.0], device="cuda:0"),
    lambda: torch.tensor(3.0, device=torch.device("cuda")),
    lambda: torch.tensor([]).cuda(),
    lambda: torch.arange(3).to("cuda", torch.float16),
    lambda: torch.ones(3).to(0),
    lambda: torch.zeros(3, device="cuda").new_tensor([1, 2]),
    lambda: torch.rand(3, device="cuda").pow(2),
    lambda: torch.nn.Linear(3, 3, device="cuda").weight,
])  # fmt: skip
def test_every_way_to_the_card_ends_there(make):
    with simulator("T4"):
        assert make().device == torch.device("cuda", 0)
        assert make().cpu().device == torch.device("cpu")


def test_default_device_holds_inside_and_not_after():
    with simulator("T4"):
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
        torch.set_default_device("cuda")
        assert torch.ones(2).is_cuda and torch.tensor([1.0]).is_cuda
    assert torch.ones(2).device == torch.device("cpu") and type(torch.ones(2)) is torch.Tensor


def test_the_host_is_real():
    with simulator("T4"):
        assert torch.arange(10).sum().item() == 45
        assert torch.randperm(5).sort().values.tolist() == [0, 1, 2, 3, 4]


MIXES = {
    "sum": lambda card, host: card + host,
    "sums": lambda card, host: torch._foreach_add([card], [host]),
    "in place": lambda card, host: torch._foreach_lerp_([card, host], [host, host], 0.5),
    "the other way": lambda card, host: torch._foreach_mul_([host, host], [host, card]),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_tensors_on_card_and_host_do_not_mix(mix):
    with simulator("T4"), pytest.raises(RuntimeError, match=r"same device.* (cuda:0 and cpu|cpu and cuda:0)!"):
        mix(torch.ones(3, device="cuda"), torch.ones(3))


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


def test_a_float_read_from_the_card_is_the_placeholder():
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        assert repr(loss) == "tensor(?, device='cuda:0')"
        assert f"{loss:.2f} {loss.item():.3f} {sum([loss.item()], 0.0) / 2:.1f}" == "? ? ?"
        assert f"{loss.item():>6.2f}|{round(loss.item(), 3):<4}|{loss:8.4f}" == "     ?|?   |       ?"
        assert str(torch.rand(3000, device="cuda").cpu().tolist()[0]) == "?"
        with pytest.warns(UserWarning, match=r"float\(\).*no values"):
            assert float(loss) == PLACEHOLDER
        with pytest.warns(UserWarning, match="Tensor.numpy.*no values"):
            assert loss.cpu().numpy() == PLACEHOLDER
        with pytest.warns(UserWarning, match="from .item"):
            torch.zeros(3)[0] = loss.item()


@pytest.mark.parametrize(("compare", "taken"), [
    (lambda loss: 1 if loss > 2 else 0, 0),
    (lambda loss: loss.item() < 1.5, True),
    (lambda loss: max(loss.item(), 0.5), PLACEHOLDER),
    (lambda loss: 1 if loss.sign() == 1 else 0, 1),
    (lambda loss: bool(torch.lt(loss, loss)), False),
    (lambda loss: loss.argmax().item() == 3, False),
    (lambda loss: bool(loss.item()), True),
])  # fmt: skip
def test_a_comparison_with_a_bound_takes_the_placeholder_and_says_so(compare, taken):
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        with pytest.warns(UserWarning, match="a comparison .*1.0, or 0 for integers"):
            assert compare(loss) == taken


def test_a_line_warns_once_although_libraries_catch_warnings():
    with warnings.catch_warnings(record=True) as shown, simulator("T4"):
        warnings.simplefilter("default")
        for loss in torch.rand(3, device="cuda"):
            float(loss)
            with warnings.catch_warnings():  # Python forgets which lines have warned
                warnings.simplefilter("ignore")
    assert len(shown) == 1


def test_a_number_compared_with_itself_is_no_decision():
    with simulator("T4"), warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = torch.rand(2000, device="cuda").mean().item()
        assert (loss != loss, loss == loss) == (False, True)
        assert json.loads(json.dumps({"loss": loss}, indent=2)) == {"loss": PLACEHOLDER}


@pytest.mark.parametrize("sizes", [
    lambda loss: range(int(loss.item())),
    lambda loss: range(loss.argmax().item()),
    lambda loss: [1, 2, 3][: loss.argmax().item()],
    lambda loss: torch.arange(loss, device="cuda"),
    lambda loss: torch.zeros(4)[: loss.long()],
])  # fmt: skip
def test_what_would_size_something_is_refused_with_the_line_and_a_way_that_works(sizes):
    with simulator("T4"):
        loss = torch.rand(2000, device="cuda").mean()
        with pytest.raises(NotAvailable, match=r"test_simulator\.py, line \d+"):
            sizes(loss)
    with simulator("T4", assume=1.0):
        sizes(torch.rand(2000, device="cuda").mean())


def test_torch_itself_refuses_a_size_that_is_not_known():
    with simulator("T4"), pytest.raises(TypeError, match="a value that the simulated GPU does not have"):
        torch.zeros(torch.rand(2000, device="cuda").argmax().item())


def test_assume_is_the_value_of_whole_numbers_flags_and_times_too():
    with simulator("T4", assume=1.0):
        chosen = torch.rand(4, 5000, device="cuda").argmax(-1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert [int(each) for each in chosen] == chosen.tolist() == [1, 1, 1, 1]
        assert chosen[0].item() == 1 and bool((chosen[0] > 7).any()) is False
        assert start.elapsed_time(end) == 1.0
        held = torch.zeros(4, dtype=torch.int64)
        assert held.copy_(chosen).tolist() == [1, 1, 1, 1]


def test_lists_of_the_card_s_numbers_make_tensors():
    with simulator("T4"):
        lengths, losses = torch.tensor([3, 4], device="cuda"), torch.rand(2, device="cuda")
        assert torch.tensor([lengths[0], lengths[1]], device="cuda").tolist() == [3, 4]
        assert torch.tensor([[lengths[1]], [2]]).tolist() == [[4], [2]]
        assert str(torch.tensor([losses[0], 1.0], device="cuda").sum().item()) == "?"


def test_what_holds_no_simulated_tensor_is_saved_for_real(tmp_path):
    with simulator("T4"):
        torch.save({"step": 3, "x": torch.arange(4)}, tmp_path / "step.pt")
    assert torch.load(tmp_path / "step.pt")["x"].tolist() == [0, 1, 2, 3]


# ---- nothing stays


def everything() -> dict:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.amp import autocast_mode

    modules = (torch, torch.cuda, torch.cuda.memory, torch.accelerator, torch.autograd, nn.functional)
    classes = (nn.Module, nn.Parameter, FakeTensor, DataLoader, autocast_mode.autocast, torch.Tensor,
               torch.autograd.profiler.profile)  # fmt: skip
    return {(owner.__name__, name): value for owner in (*modules, *classes) for name, value in vars(owner).items()}


def changed(before: dict, after: dict) -> list:
    return [key for key in before if after.get(key) is not before[key]] + [key for key in after if key not in before]


@pytest.mark.parametrize("raises", [False, True])
def test_nothing_stays_patched(raises):
    with simulator("T4"):
        nn.Linear(3, 3).cuda()  # what torch imports lazily is there
    before = everything()
    with pytest.raises(KeyError) if raises else simulator("V100-16GB"):
        if raises:
            with simulator("T4"):
                nn.Linear(3, 3).cuda()(torch.ones(3, device="cuda")).sum().backward()
                raise KeyError
    assert changed(before, everything()) == []
    assert not torch.cuda.is_available()
    assert type(nn.Linear(3, 3).weight.data) is torch.Tensor
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.ones(1, device="cuda")
    with simulator("T4"):
        pass


def test_what_torch_first_looks_up_inside_is_its_own():
    """torch keeps the list of functions that torch.device("meta") redirects: with ours in it, a model that is built
    later on the meta device would keep uninitialised weights."""
    listed = symbol("torch.utils._device._device_constructors")
    listed.cache_clear()
    tiny = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    lab.simulate(tiny, lab.Training(seq_len=8), "T4")
    with torch.device("meta"):
        assert torch.tensor([]).is_meta


def test_nesting_is_refused():
    with simulator("T4") as sim:
        with pytest.raises(SpecError, match="T4 is open"), simulator("A100-40GB"):
            pass
        torch.ones(1, device="cuda")
        assert sim.allocated == 0 and sim.peak_allocated == 512


def test_a_second_thread_is_refused():
    caught = []

    def work():
        uses = (torch.cuda.memory_allocated, lambda: torch.ones(1, device="cuda"), lambda: simulator("T4").__enter__())
        for use in uses:
            try:
                use()
            except SpecError as error:
                caught.append(str(error))

    with simulator("T4"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(caught) == 3 and all("thread" in text for text in caught)


def test_bad_cards_are_refused():
    with pytest.raises(UnknownName), simulator("T5"):
        pass
    with pytest.raises(NotAvailable, match="CUDA"), simulator("MI300X"):
        pass
