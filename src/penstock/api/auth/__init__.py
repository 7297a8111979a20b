"""Whose request it is, and how much of the server it may take."""
