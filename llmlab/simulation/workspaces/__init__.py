"""Workspaces: what CUDA kernels allocate besides their outputs."""
