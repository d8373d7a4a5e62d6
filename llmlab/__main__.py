"""`python -m llmlab` is the command `llmlab`, also where its folder of programs is not on the search path."""

from .cli.main import main

main()
