"""The operators of a step of any size."""

from llmlab.traces.kernels import Kernel, KernelFormula, KernelTrace
from llmlab.traces.polynomials import Monomial, constant

LINEAR = Kernel("aten::mm", "matmul", "bf16", 0, 0, (), 0, False, "forward")


def test_a_matmul_of_all_tokens_has_rows_by_tokens_and_runs_once_more_for_a_deeper_model():
    """(B · T, 64) by (64, 32) in bf16: 2 · 64 · 32 FLOP a row, 2 · (64 + 32) bytes, and the weight's."""
    weight = 2.0 * 64 * 32
    formula = KernelFormula(LINEAR, ((Monomial(weight, 1, 1),), (Monomial(192.0, 1, 1), Monomial(weight, 0, 0)),
                                     constant(1), constant(0), constant(64), constant(1), (Monomial(1.0, 1, 1),),
                                     constant(32), constant(64)))  # fmt: skip
    shallow, deep = KernelTrace((formula,), (0,), (0, 0)).at(3, 100)
    (kernel,) = shallow
    assert (kernel.flops, kernel.bytes, kernel.launches) == (2 * 300 * 64 * 32, 2 * (300 * 96 + 64 * 32), 1)
    assert (kernel.again, kernel.row, kernel.shape) == (0, 64, (1, 300, 32, 64))
    assert deep[0] is deep[1] is kernel
