"""The OpenAI dialect over HTTP: requests in, events out, errors as status codes."""
