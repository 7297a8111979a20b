"""The engines behind `worker.backend.Backend`: the embedded engine and the simulator; external ones have folders."""
