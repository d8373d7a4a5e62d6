"""torch.distributed on a simulated card: one rank of many, whose other ranks are not there."""
