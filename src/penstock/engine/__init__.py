"""The embedded engine: a Llama-family model, a radix KV cache, a scheduler, a sampler. No I/O."""
