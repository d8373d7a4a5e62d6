"""Monkeypatches: what torch, transformers and bitsandbytes get instead of their own under a simulated card."""
