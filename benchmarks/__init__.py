"""What llmlab predicts beside what others measured and what other tools predict: scripts, run as modules from the
root."""
