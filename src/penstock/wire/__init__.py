"""The messages between the parts, their errors, and the one codec."""
