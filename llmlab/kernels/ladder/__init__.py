"""One file a kernel, five rungs a file."""
