"""What the book builds from scratch: one package per subject, one file per technique."""
