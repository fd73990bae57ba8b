"""The OpenAI-compatible HTTP endpoint: a translator between HTTP and the gRPC API."""
