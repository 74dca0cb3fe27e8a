"""What a model takes of the devices' memory, and which context, layouts and residencies fit. Before the load."""
