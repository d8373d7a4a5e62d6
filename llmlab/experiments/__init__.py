"""Programs on several processes, which chapters and tests run: `python -m llmlab.experiments NAME --help`."""
