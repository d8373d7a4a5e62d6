"""Autocast on the simulated GPU has CUDA's table: the one in torch's own build."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmlab.simulation.engine.operators import decomposed
from llmlab.simulation.patching import autocast
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": autocast.HALF,
    "AT_FORALL_FP32": autocast.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": autocast.BY_DTYPE,
    "AT_FORALL_PROMOTE": autocast.WIDEST,
}
# autocast_mode.cpp has these beside the header's.
BESIDE = {
    "cudnn_convolution": autocast.HALF,
    "cudnn_convolution_transpose": autocast.HALF,
    "norm.Scalar": autocast.BY_DTYPE,
    "norm.ScalarOpt_dim": autocast.BY_DTYPE,
    "binary_cross_entropy": autocast.REFUSED,
}
REGISTERED = sorted(
    name
    for key in ("AutocastCUDA", "AutocastCPU")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    if name.startswith("aten::")
)
HALF, FULL = torch.float16, torch.float32


@pytest.mark.skipif(not HEADER.exists(), reason="a torch without its headers")
def test_the_policies_are_those_of_torchs_header():
    text = HEADER.read_text(encoding="utf-8")
    wanted = dict(BESIDE)
    for macro, kind in MACROS.items():
        listed = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*)", text)[1]
        wanted |= {name.replace(", ", "."): kind for name in re.findall(r"_\(([^)]+)\)", listed)}
    found = {name.removeprefix("aten::"): policy.kind for name, policy in autocast.policies("cuda").items()}
    assert found == wanted and wanted["rms_norm"] == autocast.FP32


class Watching(TorchDispatchMode):
    """Raises what `op`, or another overload of it, was called with."""

    def __init__(self, op) -> None:
        super().__init__()
        self.op = op

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is self.op.overloadpacket:
            raise autocast.reached(func, args, kwargs or {})
        if func is torch.ops.aten.linear.default:
            return decomposed(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def on_card(dtype):
    return torch.empty(1, dtype=dtype, device="cuda")


def cudas(op, dtypes):
    make = lambda dtype: autocast._Empty(dtype, "cuda")  # noqa: E731
    return outcome(lambda: autocast.handed_on(op, autocast.KEYS.AutocastCUDA, make, dtypes))


def ours(op, dtypes):
    def call():
        with Watching(op):
            return autocast.handed_on(op, autocast.KEYS.AutocastCPU, on_card, dtypes)

    with torch.autocast("cuda", HALF):
        return outcome(call)


def outcome(call):
    try:
        return call()
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("dtypes", [[FULL], [HALF], [HALF, FULL], [torch.bfloat16]], ids=str)
def test_each_operator_gets_from_autocast_what_cudas_own_kernel_gives_it(dtypes):
    """The CUDA kernels of this build against what runs on the simulated GPU, for each operator that has either."""
    listed = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    wanted = {name: cudas(autocast.operator(name), dtypes) for name in REGISTERED if name in listed}
    with simulator("T4"):
        for name in REGISTERED:
            if name in listed:
                assert ours(autocast.operator(name), dtypes) == wanted[name], name
            else:
                assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, "AutocastCPU"), name


def test_the_cpus_own_table_is_back_after_the_block():
    before = {name: torch._C._dispatch_dump(name) for name in REGISTERED}
    with simulator("T4"):
        assert torch._C._dispatch_dump("aten::cross_entropy_loss") != before["aten::cross_entropy_loss"]
    assert {name: torch._C._dispatch_dump(name) for name in REGISTERED} == before


# ---- what it means in bytes


@pytest.fixture
def peak():
    """Give the most that a call has allocated above where it began, under autocast in fp16."""
    with simulator("A100-40GB"), torch.autocast("cuda", HALF):

        def measured(call):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = call()
            assert result is not None
            return torch.cuda.max_memory_allocated() - before

        yield measured


def test_cross_entropy_keeps_half_log_probabilities_and_widens_them_for_the_loss(peak):
    """No policy of its own: it asks log_softmax for the logits' dtype, and nll_loss is on the list of fp32. Without
    that dtype log_softmax is in fp32, one kernel from fp16 (native/LossNLL.cpp, native/SoftMax.cpp)."""
    logits = torch.empty(2048, 51200, dtype=HALF, device="cuda", requires_grad=True)
    labels = torch.zeros(2048, dtype=torch.int64, device="cuda")
    size, numbers = 2048 * 51200, 2 * 512  # the loss, and the number of targets
    assert peak(lambda: F.cross_entropy(logits, labels)) == (2 + 4) * size + numbers
    assert peak(lambda: F.nll_loss(F.log_softmax(logits, -1), labels)) == 4 * size + numbers


def test_rms_norm_of_half_queries_widens_them_and_returns_fp32(peak):
    x = torch.empty(64, 256, dtype=HALF, device="cuda")
    norm = nn.RMSNorm(256).cuda()
    widened, statistics = 64 * 256 * 4, 512
    assert peak(lambda: norm(x)) == 2 * widened + statistics
    assert norm(x).dtype == FULL


def test_products_with_vectors_run_in_half_and_cast_a_weight_once(peak):
    weight, x = nn.Linear(256, 256).cuda().weight, torch.empty(256, device="cuda")
    size, vector = 256 * 256 * 2, 512
    assert torch.mv(weight, x).dtype == HALF
    assert peak(lambda: torch.mv(weight, x)) == 2 * vector  # the vector's cast, and the result
    assert peak(lambda: torch.einsum("oi,i->o", weight, x)) < size
    assert torch.addmv(x, weight, x).dtype == HALF


def test_norms_of_half_vectors_are_fp32_and_copy_nothing(peak):
    x = torch.empty(64, 256, dtype=HALF, device="cuda")
    assert {torch.linalg.vector_norm(x).dtype, x.norm().dtype, x.norm(dim=-1).dtype, x.prod(-1).dtype} == {FULL}
    assert peak(lambda: x.prod(-1)) == 512  # a number a row


def test_cat_of_two_dtypes_casts_as_it_writes(peak):
    """The CPU's autocast widens each input first; CUDA's has no policy."""
    x = torch.empty(64, 256, dtype=HALF, device="cuda")
    y = torch.empty(64, 256, device="cuda")
    assert peak(lambda: torch.cat((x, y))) == 2 * 64 * 256 * 4


def test_what_cuda_alone_casts_stays_as_it_is_on_the_host():
    with simulator("T4"), torch.autocast("cuda", HALF):
        x = torch.ones(3, dtype=HALF)
        assert {x.exp().dtype, x.sum().dtype, x.norm().dtype, torch.mv(x[None], x).dtype} == {HALF}
