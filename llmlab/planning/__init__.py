"""The search for the best configuration of a model on given GPUs, and the changes that make a run fit."""
