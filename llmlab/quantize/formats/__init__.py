"""Number formats of quantized weights, one file per format."""
