"""Tokens to text and back: tokenizers, incremental detokenization, stop strings, chat templates. Pure, no I/O but model files."""
