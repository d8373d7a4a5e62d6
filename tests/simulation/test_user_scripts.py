"""Scripts as strangers write them for "cuda", inside `lab.simulator`: they run, and show the bytes per GPU would."""

import math
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llmlab as lab
from llmlab.base.errors import NotAvailable
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

MiB = 1 << 20


# ---- values: a loop that checks and logs goes the way of a healthy run


def test_what_the_card_computes_is_finite(card):
    loss = nn.Linear(8, 1).cuda()(torch.randn(4, 8).cuda()).mean()
    assert not torch.isnan(loss) and not loss.isinf() and torch.isfinite(loss).all()
    assert math.isfinite(loss.item()) and not torch.isnan(torch.randn(2000, device="cuda")).any()
    loss.backward()


def test_clipping_that_raises_on_infinite_gradients_does_not(card):
    model = nn.Linear(8, 8).cuda()
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_assumed_floats_let_early_stopping_and_plateaus_run():
    with simulator("T4", assume=2.5):
        loss = torch.rand(2000, device="cuda").mean()
        assert loss.item() == float(loss) == 2.5 and min(3.0, loss.item()) == 2.5
        assert bool(loss < 3) and not bool(loss > 3) and f"{loss:.2f}" == "2.50"
        parameter = nn.Parameter(torch.ones(3, device="cuda"))
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([parameter], lr=1.0), patience=0)
        for _ in range(3):
            schedule.step(loss)
        assert schedule.get_last_lr()[0] < 1.0


def test_known_masks_and_lengths_size_what_they_select(card):
    x = torch.randn(10, 3, device="cuda")
    mask = torch.tensor([True] * 4 + [False] * 6).cuda()
    before = card.allocated
    chosen = x[mask]
    assert chosen.shape == (4, 3) and card.allocated - before == 512  # and the index went back
    assert x[mask.nonzero(as_tuple=True)[0]].shape == (4, 3) and torch.where(mask)[0].shape == (4,)
    assert torch.masked_select(x, mask[:, None]).shape == (12,)
    assert x.repeat_interleave(torch.tensor([2] * 10).cuda(), dim=0).shape == (20, 3)
    on_host = mask.cpu()  # a copy of what the GPU has
    assert on_host.nonzero().tolist() == [[0], [1], [2], [3]] and torch.arange(10)[on_host].tolist() == [0, 1, 2, 3]
    labels = torch.tensor([1, -100, 3]).cuda()
    assert labels[labels != -100].unique().tolist() == [1, 3] and labels.sort().values.tolist() == [-100, 1, 3]


@pytest.mark.filterwarnings("ignore:unique")
@pytest.mark.filterwarnings("ignore:a comparison")
def test_classes_that_only_a_check_counts_have_a_stand_in(card):
    """As torchmetrics' validation of labels has it (functional/classification/stat_scores.py)."""
    predictions = torch.randn(32, 10, device="cuda").argmax(1)
    assert len(torch.unique(predictions)) <= 10
    number = torch.unique(predictions).numel()
    if number > 10:
        raise AssertionError
    classes = torch.unique(predictions)
    assert torch.all((classes >= 0) & (classes < 10))
    with pytest.raises(NotAvailable, match="unique"):
        sizes = torch.unique(predictions)
        torch.zeros(len(sizes))


@pytest.mark.parametrize("operator, call", [
    (r"aten.index.Tensor, which is x\[mask\]", lambda x: x[x > 0]),
    ("aten.masked_select", lambda x: x.masked_select(x > 0)),
    ("aten.nonzero", lambda x: torch.where(x > 0)),
    ("unique", lambda x: x.unique()),
    ("repeat_interleave", lambda x: x.repeat_interleave((x > 0).long())),
])  # fmt: skip
def test_sizes_the_card_computes_are_refused_with_operator_line_and_way_round(card, operator, call):
    with pytest.raises(NotAvailable, match=rf"{operator}.*made on the host.*test_user_scripts\.py, line \d+"):
        call(torch.rand(2000, device="cuda"))


def test_a_causal_mask_of_floats_is_recognised(card):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).cuda()
    x = torch.randn(2, 64, 32, device="cuda")
    mask = nn.Transformer.generate_square_subsequent_mask(64)  # 4096 elements
    for each in (mask.cuda(), nn.Transformer.generate_square_subsequent_mask(64, device="cuda")):
        encoder(x, mask=each).sum().backward()
    encoder.eval()
    with torch.no_grad():
        padding = torch.zeros(2, 64, dtype=torch.bool)
        assert encoder(x, src_key_padding_mask=padding.cuda()).shape == x.shape


def test_token_ids_drawn_on_the_card_are_ids_and_leave_the_hosts_generator_alone(card):
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    ids = torch.randint(5, 9, (100,), device="cuda")
    assert set(ids.tolist()) == {5, 6, 7, 8} and torch.rand(1).item() == expected
    assert sorted(torch.randperm(50, device="cuda").tolist()) == list(range(50))


# ---- modes of autograd


def test_inference_mode_takes_what_no_grad_takes(card):
    """Without autograd's keys a mode is given operators that have no kernel, such as linear, whole."""
    q = torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    linear, norm = nn.Linear(64, 64).cuda().bfloat16(), nn.LayerNorm(64).cuda().bfloat16()
    labels = torch.zeros(q.numel() // 64, dtype=torch.long, device="cuda")
    steps = (
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), lambda: F.dropout(q, 0.1),
        lambda: F.cross_entropy(q.view(-1, 64), labels), lambda: F.rms_norm(q, (64,)), lambda: norm(q),
        lambda: torch.einsum("bhtd,bhsd->bhts", q, q), lambda: q.half().softmax(-1, torch.float32), lambda: linear(q),
    )  # fmt: skip

    def taken(mode):
        found, before = [], card.allocated
        with mode:
            for step in steps:
                card.reset_peak()
                step()
                found.append(card.peak_allocated - before)
        return found

    with torch.inference_mode():
        linear(q)
    assert card.allocated > card.gpu.cublas_workspace  # cuBLAS is there
    inference = taken(torch.inference_mode())
    assert inference == taken(torch.no_grad())
    dropped = q.numel() * 2 + q.numel()  # the output, and a mask of 1 B an element
    assert inference[1] == dropped and not card.notes


def test_gradients_of_each_sample_take_a_batch_of_gradients(card):
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False)).cuda()
    x, y = torch.randn(8, 32, device="cuda"), torch.randn(8, 16, device="cuda")

    def loss(weights, x, y):
        return ((torch.func.functional_call(model, weights, (x[None],)) - y) ** 2).mean()

    weights = {name: each.detach() for name, each in model.named_parameters()}
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)  # cuBLAS takes its workspace
    before = card.allocated
    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    assert each["0.weight"].shape == (8, 64, 32) and card.allocated - before == 8 * 4 * (64 * 32 + 16 * 64)


# ---- torch.cuda


def test_the_kernels_switched_off_are_not_taken(card):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B, H, T, D = 2, 4, 256, 64
    q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def taken(backend):
        before = card.allocated
        card.reset_peak()
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, k, v)
        return card.peak_allocated - before

    scores = B * H * T * T * 2
    assert taken(SDPBackend.FLASH_ATTENTION) < scores <= taken(SDPBackend.MATH)
    with pytest.raises(RuntimeError, match="No available kernel"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(T, T, dtype=torch.bool, device="cuda"))


def test_capturable_optimizers_keep_their_step_on_the_card(card):
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    assert all(state["step"].is_cuda for state in optimizer.state.values())


def test_custom_functions_under_autocast_get_half_inputs(card):
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, x):
            assert x.dtype == torch.float16
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return grad * 2

    x = torch.randn(3, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert x.grad.is_cuda


# ---- custom kernels


def test_an_operator_without_a_fake_kernel_is_named(card):
    @torch.library.custom_op("llmlab_test::without_fake", mutates_args=())
    def without_fake(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    with pytest.raises(NotAvailable, match=r"llmlab_test.*register_fake.*test_user_scripts\.py, line"):
        without_fake(torch.ones(3, device="cuda"))


def test_a_fake_kernel_may_ask_for_the_device(card):
    @torch.library.custom_op("llmlab_test::with_fake", mutates_args=())
    def with_fake(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @with_fake.register_fake
    def _(x):
        return torch.empty(x.shape, device=x.device)

    x = torch.ones(3, device="cuda")
    y = with_fake(x)
    assert y.is_cuda and card.allocated == 2 * 512


def test_compiled_kernels_and_graphs_are_refused_with_the_line(card):
    from torch.utils.cpp_extension import load_inline

    for call in (
        lambda: load_inline("kernel", cpp_sources="", cuda_sources="__global__ void f() {}"),
        torch.cuda.CUDAGraph,
    ):
        with pytest.raises(NotAvailable, match=r"test_user_scripts\.py, line \d+"):
            call()


def test_addresses_tell_shared_weights_from_others(card):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda()
    model[1].weight = model[0].weight
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr() != model[0].bias.data_ptr()
    row = model[0].weight[1]
    assert row.data_ptr() - model[0].weight.data_ptr() == 16 and row.data_ptr() % 16 == 0


# ---- checkpoints


def test_packed_sequences_hold_what_their_lengths_say(card):
    layer = nn.LSTM(256, 320, batch_first=True).cuda()
    x, lengths = torch.randn(3, 40, 256, device="cuda"), torch.tensor([7, 40, 20])
    before = torch.cuda.memory_allocated()
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert packed.data.shape == (67, 256) and packed.batch_sizes.tolist() == [3] * 7 + [2] * 13 + [1] * 20
    assert 0 <= torch.cuda.memory_allocated() - before - 4 * 67 * 256 <= 3 * 512  # and the order, and its reverse
    out, (hidden, _) = layer(packed)
    padded, back = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    assert padded.shape == (3, 40, 320) and back.tolist() == [7, 40, 20] and hidden.shape == (1, 3, 320)
    padded.sum().backward()
    assert layer.weight_hh_l0.grad.shape == (4 * 320, 320)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_read_the_lengths_of_packed_sequences_in_inference_mode(card, layer):
    with torch.inference_mode():
        x = torch.randn(3, 40, 256, device="cuda")
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([40, 20, 7]), batch_first=True)
        out, _ = layer(256, 320, batch_first=True).cuda()(packed)
    assert out.data.shape == (67, 320)


def test_packed_sequences_of_lengths_that_the_card_computed_are_refused(card):
    with pytest.raises(NotAvailable, match=r"pack_padded_sequence.*lengths on the host"):
        torch._VF._pack_padded_sequence(
            torch.randn(2, 1040, 3, device="cuda"), torch.rand(2, device="cuda").mul(9).long(), True
        )


def test_distributions_find_their_parameters_valid(card):
    scores = nn.Linear(4, 3, device="cuda")(torch.randn(8, 4, device="cuda"))
    policy = torch.distributions.Categorical(logits=scores)
    actions = policy.sample()
    assert policy.log_prob(actions).shape == policy.entropy().shape == (8,)
    normal = torch.distributions.Normal(scores, scores.exp())
    assert torch.distributions.kl_divergence(normal, normal).shape == (8, 3)


def test_lbfgs_steps(card):
    model, x = nn.Linear(256, 8).cuda(), torch.randn(16, 256, device="cuda")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    before = torch.cuda.memory_allocated()
    optimizer.step(closure)
    optimizer.step(closure)
    state = optimizer.state[model.weight]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert state["n_iter"] > 0 and state["d"].shape == (numbers,)
    assert torch.cuda.memory_allocated() - before >= 2 * 4 * numbers  # direction, and the gradient before


def test_sparse_tensors_are_refused_with_the_way_round(card):
    edges = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), check_invariants=True)
    with pytest.raises(NotAvailable, match=r"sparse tensor, which is not simulated; to_dense\(\) it on the host"):
        edges.cuda()


# ---- running out of memory


def test_a_batch_size_finder_halves_to_what_fits_and_leaves_no_memory_behind(card):
    model = nn.Linear(4096, 4096).cuda()
    held, batch, tried = card.allocated, 1 << 22, []
    while True:
        tried.append(batch)
        try:
            model(torch.randn(batch, 4096, device="cuda")).sum().backward()
            break
        except torch.cuda.OutOfMemoryError:
            batch //= 2
        torch.cuda.empty_cache()
        assert card.allocated <= held + 2 * card.gpu.cublas_workspace + MiB
    # x and y are 16 KiB per row each. The gradient of y is one number, expanded, and copied for the product with x;
    # what y left has no room for that copy, as the gradient of the weight is cut from it first.
    room = card.gpu.memory - held
    assert tried == [1 << 22, 1 << 21, 1 << 20, 1 << 19] and 3 * 16384 * batch < room < 6 * 16384 * batch
    model.zero_grad()
    assert card.allocated == held + 2 * card.gpu.cublas_workspace + MiB  # a bias goes through cuBLASLt: 1 MiB


def test_what_catches_the_error_holds_no_more_than_on_a_gpu(card):
    x = torch.empty(14 << 30, dtype=torch.uint8, device="cuda")
    try:
        (x + 1).neg().neg()  # the third one fits in no more
    except torch.cuda.OutOfMemoryError as error:
        assert card.allocated == x.numel(), error
    else:
        pytest.fail("three times 14 GiB fit in 40")


def test_resizing_that_finds_no_room_is_survived():
    with simulator("T4") as sim:
        x = torch.empty(1 << 20, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            x.untyped_storage().resize_(1 << 40)
            x.add_(1)
        del x
    assert sim.allocated == 0


# ---- the block


def test_cell_by_cell_as_in_a_notebook():
    block = lab.simulator("T4")
    sim = block.__enter__()
    x = torch.ones(3, device="cuda")
    block.__exit__(None, None, None)
    assert x.shape == (3,) and sim.peak_allocated == 512 and not torch.cuda.is_available()


def test_scripted_and_traced_models_run(card):
    scripted = torch.jit.script(nn.Linear(3, 3).cuda())
    traced = torch.jit.trace(nn.Linear(3, 3).cuda(), torch.ones(1, 3, device="cuda"))
    for each in (scripted, traced):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert each(torch.ones(1, 3, device="cuda")).is_cuda


def test_triton_s_launches_are_counted_and_take_nothing(card):
    triton = pytest.importorskip("triton")

    @triton.jit
    def doubled(x, y, n):
        pass

    @triton.autotune([triton.Config({"N": 1}), triton.Config({"N": 2})], key=[])
    @triton.jit
    def tuned(x, N):
        pass

    x = torch.zeros(1024, device="cuda")
    before = card.allocated
    for _ in range(2):
        doubled[(8,)](x, x, 1024)
    tuned[lambda meta: (1,)](x)
    assert card.allocated == before
    assert any(note.code == "triton-kernels" and "doubled (2), tuned (1)" in note for note in card.notes), card.notes


@pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="torch before 2.9")
def test_a_kernel_of_nvrtc_is_counted_and_takes_nothing(card):
    kernel = torch.cuda._compile_kernel("__global__ void twice(float* x) {}", "twice", compute_capability="90")
    kernel.set_shared_memory_config(1 << 16)
    x = torch.zeros(1024, device="cuda")
    before = card.allocated
    kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[x])
    assert card.allocated == before
    assert any(note.code == "triton-kernels" and "twice (1)" in note for note in card.notes), card.notes


class WithWorkers(torch.utils.data.DataLoader):
    """As litdata's, which makes its iterator by itself."""

    def _get_iterator(self):
        return torch.utils.data.dataloader._MultiProcessingDataLoaderIter(self)


def test_a_loader_that_makes_its_own_workers_does_not_pin(card):
    loader = WithWorkers(torch.arange(8), batch_size=4, num_workers=1, pin_memory=True)
    assert [batch.cuda().tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_data_parallel_runs_on_the_one_card(card):
    model = nn.DataParallel(nn.Linear(4, 4)).cuda()
    assert model(torch.randn(2, 4)).device.type == "cuda"


def test_torch_distributed_optim_is_imported_inside():
    """In a process of its own: TorchScript compiles torch's optimizers at the first import."""
    script = "    from torch.distributed.optim import ZeroRedundancyOptimizer"
    program = f"import llmlab as lab\nwith lab.simulator('T4'):\n{script}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_values_go_with_data(card):
    parameter = torch.nn.Parameter(torch.zeros(384, device="cuda"))
    parameter.data = torch.empty(0, device="cuda")
    assert parameter.view_as(parameter).shape == (0,)
    parameter.data = torch.arange(3.0, device="cuda")
    assert parameter.tolist() == [0, 1, 2]
