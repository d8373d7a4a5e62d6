"""The files that run a configuration: a training script, the settings of engines, and the files that start them."""
