"""Programs on several processes, which chapters and tests run: `python -m llmlab.course.experiments NAME --help`."""
