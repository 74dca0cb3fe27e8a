"""What work costs: the model, how it is measured at start, corrected by real work, and kept in files. Pure."""
