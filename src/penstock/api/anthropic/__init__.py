"""The Anthropic Messages API over HTTP."""
