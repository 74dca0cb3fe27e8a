"""Model files: found, opened, read as strangers' bytes, and made the facts that all else is decided from."""
