"""From settings to a group of workers that holds a model: its shares, what fits, what its work costs."""
