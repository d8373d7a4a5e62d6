"""torch.compile on the simulated card: torch's own compiler runs up to the kernels, which are not made."""
