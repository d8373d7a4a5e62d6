"""The dispatch mode that runs operators on fake tensors and allocates memory for every storage."""
