"""Drawings of the chapters, a module per subject: they take data, and return pictures."""
