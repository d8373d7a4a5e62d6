"""Known values of fake tensors, and placeholders for unknown ones."""
