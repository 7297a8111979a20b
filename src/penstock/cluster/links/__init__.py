"""The connection between a front end and a worker."""
