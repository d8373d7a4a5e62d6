"""The version of llmlab, which pyproject.toml reads here."""

__version__ = "0.1.0"
