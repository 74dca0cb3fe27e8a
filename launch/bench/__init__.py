"""Timed runs and measurements, and the tables they are told in."""
