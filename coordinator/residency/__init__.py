"""Weights that do not fit for both layouts: which layers migrate, when it pays, and where they lie now. Pure."""
