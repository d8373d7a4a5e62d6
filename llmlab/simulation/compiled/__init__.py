"""torch.compile on the simulated card."""
