"""The kernels of a Llama block, one file per kernel with its five rungs."""
