"""Tokens to text and back: tokenizers, incremental detokenization, stop strings, chat templates. Its only I/O is reading model files."""
