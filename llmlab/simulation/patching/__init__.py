"""Monkeypatches of torch, transformers and bitsandbytes that a simulated GPU needs."""
