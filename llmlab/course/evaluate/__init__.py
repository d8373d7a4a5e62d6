"""Quality metrics of language models: perplexity, and our models in the lm-evaluation-harness (harness.py)."""

from .perplexity import Perplexity, perplexity, small_perplexity

__all__ = ["Perplexity", "perplexity", "small_perplexity"]
