"""From a request body to a stream of events."""
