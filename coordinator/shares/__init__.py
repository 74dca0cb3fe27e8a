"""Ranks of unequal speed: timed with a few of the model's layers, and the model shared out by it."""
