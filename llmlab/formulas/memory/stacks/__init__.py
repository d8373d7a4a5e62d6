"""Other stacks' blocks as data: the tensors that each of their operators saves, to compare with their source."""
