"""Which worker gets a generation: pure decisions on immutable snapshots, no I/O."""
