"""The HTTP API: the server, the route table, errors, models and sessions."""
