"""Penstock: an LLM serving stack. Tokens under pressure, none lost."""

__version__ = "0.1.0"
