"""What all external engines share: the interface, the backend, the base for vLLM and SGLang, and their KV events."""
