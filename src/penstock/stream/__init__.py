"""The heart: merging, mailboxes, outboxes, fan-in. Knows nothing of HTTP, text or engines."""
