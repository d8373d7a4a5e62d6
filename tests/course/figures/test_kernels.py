"""The drawings of the chapters on kernels: their descriptions contain what they are given."""

from llmlab.course.figures import kernels


def test_every_kernel_is_named():
    alt = kernels.draw_kernels(["cast", "pow", "mean"]).alt
    assert "3 kernels" in alt and "cast, pow, mean" in alt


def test_a_graph_break_writes_and_reads_an_intermediate_tensor():
    assert "second graph reads y again" in kernels.draw_graph_break().alt


def test_the_chunked_loss_never_has_all_logits():
    assert "never exists" in kernels.draw_chunks().alt


def test_bars_of_the_loss_have_their_bytes():
    alt = kernels.draw_loss_memory({"whole": [("fp16", 2**30), ("log-softmax", 2**31)]}).alt
    assert "fp16 1.00 GiB" in alt and "log-softmax 2.00 GiB" in alt


def test_rungs_are_listed_by_kernel():
    assert "softmax: naive 8, fused 2." in kernels.draw_rungs({"softmax": [8, 2]}, ["naive", "fused"]).alt


def test_each_row_has_a_program():
    assert kernels.draw_programs(3).alt.startswith("3 programs")
