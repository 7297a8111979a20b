"""From the body of a request to the events of its answer, for all APIs."""
