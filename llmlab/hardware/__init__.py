"""GPUs, links, nodes and this machine: tables with sources, read without torch."""

from .gpu import GPU, gpu, gpus

__all__ = ["GPU", "gpu", "gpus"]
