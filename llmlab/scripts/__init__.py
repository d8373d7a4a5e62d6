"""Scripts of one's own on a simulated card: `llmlab run --gpu A100-80GB train.py`."""
