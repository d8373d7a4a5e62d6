"""The version of llmlab, which pyproject.toml reads here, and where its book is read."""

__version__ = "0.1.0"
BOOK = "https://how-to-train-your-llm.github.io/how-to-train-your-llm/book"

MEGATRON = "0.16.1"  # release of Megatron-LM that the files of a plan install, and that is tested
