"""What every part of llmlab uses: units, errors, files, tables, and the names of parts and phases."""
