"""Into which chunks a prompt is cut, so that a pipeline of stages reads it soonest. Pure arithmetic."""
