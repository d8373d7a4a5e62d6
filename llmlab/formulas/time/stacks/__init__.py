"""What stacks with their own code do differently, each in the module of its name."""
