"""The runtime around a backend: who asked for which generation, and what waits for them."""
