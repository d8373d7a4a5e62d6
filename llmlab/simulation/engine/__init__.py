"""The dispatch mode that runs operators on fake tensors and gives every storage to the allocator."""
