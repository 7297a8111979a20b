"""The heart: merging, mailboxes, outboxes, fan-in. Knows nothing about HTTP, text or engines."""
