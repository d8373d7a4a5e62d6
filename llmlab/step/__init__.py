"""The training step and the generation that simulation and measurement run, in phases."""
