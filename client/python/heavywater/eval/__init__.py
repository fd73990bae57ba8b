"""Quality of the cache policies, measured through the public API."""
