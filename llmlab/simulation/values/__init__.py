"""Fake tensors whose values are known, and what stands in for a value that is not."""
