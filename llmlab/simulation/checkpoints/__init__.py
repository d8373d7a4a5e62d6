"""Checkpoints of a simulated card: torch.save, torch.load and safetensors where tensors have no values."""
