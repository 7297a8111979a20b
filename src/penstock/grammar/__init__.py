"""Structured output: schemas and grammars, compiled to token masks. No torch."""
