"""Tokens to text and back: templates, detokenizing, stop strings, transcripts. Reads model files; no other I/O."""
