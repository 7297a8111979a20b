"""API keys and their limits: which tenant a request belongs to, and what it may use."""
