"""Text to token ids, and the bytes of tokens."""

import os

# Otherwise the `tokenizers` library hands each text to threads of its own, where a short text waits behind the long ones of others.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
