"""PyTorch's CUDA caching allocator, the driver under it, its settings and its snapshot."""
