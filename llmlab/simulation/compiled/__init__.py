"""torch.compile on the simulated GPU: torch's own compiler runs, but compiles no kernels."""
