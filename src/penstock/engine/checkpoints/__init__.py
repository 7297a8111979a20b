"""Model weights, read from files."""
