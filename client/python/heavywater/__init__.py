"""Client of Heavywater, a distributed KV-cache service for long-context language models."""

from heavywater.version import __version__

__all__ = ["__version__"]
