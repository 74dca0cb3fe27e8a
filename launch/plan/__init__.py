"""What `gearshift plan` says of a request that is not run."""
