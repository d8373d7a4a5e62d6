"""PyTorch's CUDA caching allocator, the driver under it and its settings."""
