"""What deploy/local/gpu-check does. Python's standard library alone: it runs where nothing can be installed."""
