"""Number formats of quantized weights and KV caches, one file per format."""
