"""The command line: the same words as the API, one command per verb."""
