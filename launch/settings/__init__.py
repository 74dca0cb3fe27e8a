"""What a user sets: flags, environment and config file, made into frozen settings."""
