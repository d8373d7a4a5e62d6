"""Quantization algorithms, which choose the scales and the codes of weights; one file per algorithm."""
