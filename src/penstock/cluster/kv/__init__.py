"""The transport of KV between workers."""
