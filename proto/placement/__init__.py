"""Who holds what: pure arithmetic shared by the coordinator (fit) and the workers (load)."""
