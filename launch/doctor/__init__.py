"""What a machine is like, and whether a model fits it, before anything is started."""
