"""The formula of a peak, written in the sizes of the model."""

import llmlab as lab
from llmlab.traces.explain import explained
from llmlab.traces.kernels import KernelTrace
from llmlab.traces.polynomials import Monomial
from llmlab.traces.trace import Moment, Term, Trace


def test_tensors_of_equal_formulas_are_one_row_in_the_sizes_of_the_model():
    """GPT-2: h = 768, f = 3072 and 12 heads, in bf16. Two further groups of layers have a matrix each."""
    matrix = Term((Monomial(2.0 * 768 * 3072, 0, 0),), "weights", "h.*.mlp", "empty")
    scores = Term((Monomial(2.0 * 12, 1, 2),), "activations", "h.*.attn", "bmm")
    low, high = (Moment("forward", place, {0: (2, 1), 1: (count, 0)}) for place, count in (("mlp", 0), ("attn", 1)))
    run = lab.Training(micro_batch=3, seq_len=1024, precision="bf16")
    found = explained(lab.model("gpt2"), run, Trace(2, 0, (matrix, scores), (low, high), KernelTrace((), (), ())))
    assert found.place == "attn" and found.total == sum(term.bytes for term in found.terms)
    assert [(term.count, term.formula) for term in found.terms] == [
        (1, "2 · heads · S² · B"), (4, "2 · hidden · intermediate")]  # fmt: skip
    assert found.latex() == r"1 \cdot 2 a S^2 B + 4 \cdot 2 h f"
