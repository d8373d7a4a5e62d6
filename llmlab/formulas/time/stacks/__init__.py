"""The differences of stacks with their own code, each in the module of its name."""
