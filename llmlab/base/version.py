"""The version of llmlab, which pyproject.toml reads here, and where its book is read."""

__version__ = "0.1.0"
BOOK = "https://how-to-train-your-llm.github.io/how-to-train-your-llm/book"
