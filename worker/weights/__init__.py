"""Weights: map the file, cut this rank's parts, hold them in the compute type."""
