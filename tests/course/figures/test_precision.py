"""The figures of the chapter on precision say in their alternative text what they draw."""

from llmlab.course.figures.precision import draw_bits, draw_ledger, draw_loss_scaler


def test_the_bits_name_the_formats_in_which_a_number_is_zero():
    assert draw_bits(1e-8, "1e-8").alt.endswith("It rounds to zero in fp16, fp8-e4m3, fp8-e5m2.")
    assert draw_bits(1.0, "one").alt.endswith("It rounds to zero in none of them.")


def test_the_ledger_sums_what_it_draws():
    alt = draw_ledger({"copies": (0, 2**30), "matmul outputs": (4 * 2**30, 2**31)}).alt
    assert "copies +1.00 GiB" in alt and "sum -1.00 GiB" in alt


def test_the_loss_scaler_halves_and_doubles():
    assert "halved" in draw_loss_scaler().alt and "doubles" in draw_loss_scaler().alt
