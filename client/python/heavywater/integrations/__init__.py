"""Backends for other engines' caches, on values by key at the cache service (docs/integrations.md).

`sglang` and `vllm` each need the engine in the same environment.
"""
