"""One file per engine, each behind `worker.backend.Backend`."""
