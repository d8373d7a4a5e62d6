"""Specifications: a model's sizes (ModelSpec) and a run (Training, Inference), as data that checks itself."""
