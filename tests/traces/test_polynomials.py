"""Polynomials through given points."""

from hypothesis import example, given
from hypothesis import strategies as st

from llmlab.traces.polynomials import Monomial, polynomial_through, value_of


@example({(0, 2): 1, (1, 2): 1, (2, 2): 1})  # the first three points do not determine it
@given(st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.integers(1, 2**24), min_size=1, max_size=3))
def test_a_polynomial_is_found_again_from_its_values(factors):
    """Of at most three monomials, by four points; it may be another one through the same points."""
    at = (4, 1024), (4, 1536), (3, 2016), (5, 1024)
    polynomial = tuple(Monomial(factor, *powers) for powers, factor in factors.items())
    values = tuple(value_of(polynomial, *point) for point in at)
    found = polynomial_through(values, at)
    assert found is not None and [value_of(found, *point) for point in at] == list(values)


def test_what_no_three_monomials_explain_has_no_polynomial():
    at = tuple((batch, 64) for batch in (1, 2, 3, 4))
    assert polynomial_through((10, 20, 30, 40), at) == (Monomial(10.0, 1, 0),)
    assert polynomial_through((15, 25, 35, 45), at) == (Monomial(5.0, 0, 0), Monomial(10.0, 1, 0))
    assert polynomial_through((1, 3, 2, 9), at) is None
