"""Techniques from scratch, one file per technique, named as the technique."""
