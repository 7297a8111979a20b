"""The books of the KV cache: block names, radix tree, leases, sessions, events. No torch."""
