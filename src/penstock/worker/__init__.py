"""The runtime around a backend: which front end owns which generation, and what waits for it."""
