"""The group of workers: who is in it, how all are talked with, and what they say of themselves."""
