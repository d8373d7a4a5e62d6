"""Closed formulas for memory: what is in the memory of a device, term by term, and when it peaks."""
