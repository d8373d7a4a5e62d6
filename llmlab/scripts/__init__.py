"""Runs a user's script on a simulated GPU: `llmlab run --gpu A100-80GB train.py`."""
