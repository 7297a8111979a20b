"""Text to token ids, and the bytes of tokens."""
