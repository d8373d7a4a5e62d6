"""Quantization algorithms: how weights are rounded, one file per algorithm."""
