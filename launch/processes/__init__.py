"""The workers' processes: started, watched, ended and started again."""
