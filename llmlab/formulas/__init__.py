"""Closed formulas for memory and time: pure Python, no torch. `lab.estimate` calls formulas/report.py."""
