"""Closed formulas for time: FLOP, rooflines, collectives, meshes of GPUs, offloading."""
