"""What stacks of their own code do otherwise, each in the module of its name."""
