"""The formula of a peak, written in the sizes of the model."""

import pytest

import llmlab as lab
from llmlab.base.units import show_bytes
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


NOTHING = KernelTrace((), (), ())
TOKENS, BATCH, H = 1024, 3, 768


def formulas(fixed, *terms, **fields):
    """Return the formulas of GPT-2's `terms`, whose trace could not vary T (`fixed` = 1), nor B (2)."""
    counts = Moment("backward", "bmm", {number: (1, 0) for number in range(len(terms))})
    run = lab.Training(micro_batch=BATCH, seq_len=TOKENS, **{"precision": "bf16", **fields})
    found = explained(lab.model("gpt2"), run, Trace(0, fixed, terms, (counts,), NOTHING))
    return {term.operator: term.formula for term in found.terms}


@pytest.mark.parametrize("fixed", [1, 2])
def test_sizes_that_a_trace_could_not_vary_are_found_in_its_factors(fixed):
    """A tensor between blocks, scores, a cast weight and a gradient, in the factors of 1,024 tokens."""
    batch, power = (BATCH, 0) if fixed == 2 else (1, 1)
    found = formulas(
        fixed,
        Term((Monomial(2.0 * H * TOKENS * batch, power, 0),), "activations", "h.*", "add"),
        Term((Monomial(2.0 * 12 * TOKENS**2 * batch, power, 0),), "activations", "h.*.attn", "bmm"),
        Term((Monomial(2.0 * 50257 * TOKENS * batch, power, 0),), "logits", "lm_head", "mm"),
        Term((Monomial(2.0 * H * 3072, 0, 0),), "weights", "h.*.mlp", "empty"),
        Term((Monomial(2.0 * 3 * H * H, 0, 0),), "gradients", "h.*.attn", "mul"),
    )
    assert found == {
        "add": "2 · hidden · S · B", "bmm": "2 · heads · S² · B", "mm": "2 · vocab · S · B",
        "empty": "2 · hidden · intermediate", "mul": "6 · hidden · hidden",
    }  # fmt: skip


def test_sizes_that_are_multiples_of_one_another_are_told_apart_by_the_bytes_of_an_element():
    """With an MLP 4 times as wide as the model, 4 · h · f bytes of fp32 weights are also 1 · f · f."""
    weight = Term((Monomial(4.0 * H * 3072, 0, 0),), "weights", "h.*.mlp", "empty")
    assert formulas(0, weight, precision="fp32") == {"empty": "4 · hidden · intermediate"}


def test_numbers_of_up_to_eight_bytes_are_plain_and_sums_have_both_terms():
    found = formulas(0, Term((Monomial(8.0, 1, 1),), "inputs", "", "ids"),
                     Term((Monomial(4.0, 1, 1), Monomial(2.0 * H, 0, 0)), "other", "ln", "sum"))  # fmt: skip
    assert found == {"ids": "8 · S · B", "sum": "4 · S · B + 2 · hidden"}


def test_the_table_has_the_largest_24_and_the_sum_of_the_rest():
    terms = tuple(Term((Monomial(512.0 * number, 0, 0),), "other", f"m{number}", "op") for number in range(1, 31))
    moment = Moment("forward", "op", {number: (1, 0) for number in range(30)})
    found = explained(lab.model("gpt2"), lab.Training(), Trace(0, 0, terms, (moment,), NOTHING))
    assert [term.bytes for term in found.terms] == [512 * number for number in range(30, 0, -1)]
    *shown, more, total = found.table().rows
    assert len(shown) == 24 and more[1] == "6 more" and more[-1] == show_bytes(512 * 21)
    assert total[-1] == show_bytes(512 * 465) == show_bytes(found.total)
