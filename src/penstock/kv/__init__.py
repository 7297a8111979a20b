"""The bookkeeping of the KV cache: block names, radix tree, leases, sessions, events. No torch.

Two words that are not the same:
- A **page** is a fixed piece of the engine's KV memory. It has a number. Pages are allocated, filled and freed.
- A **block** is `block_size` tokens and all before them. Its name is a hash. Routing, events and the radix tree speak of blocks.

A full page holds the KV of one block, so both have the same size.
"""
