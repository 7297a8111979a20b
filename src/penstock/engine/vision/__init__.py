"""Vision towers: pixels in, features out."""
