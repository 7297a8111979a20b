"""The commands, and the one place where objects are wired together."""
