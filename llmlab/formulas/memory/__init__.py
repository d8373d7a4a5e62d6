"""Closed formulas for memory: what a device holds, term by term, and when it peaks."""
