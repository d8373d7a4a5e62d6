"""Other stacks' blocks as data: what each operator of theirs keeps, to lay beside their source."""
