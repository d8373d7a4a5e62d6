"""From what you have to what you run: a search for the best configuration, and the changes that make a run fit."""
