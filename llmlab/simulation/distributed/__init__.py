"""torch.distributed on a simulated GPU: one rank of many, and the other ranks do not exist."""
