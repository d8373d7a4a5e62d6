"""Traces: the memory of a step of the real code as formulas of its sizes, evaluated without torch."""
