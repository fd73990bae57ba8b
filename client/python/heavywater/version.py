"""The version, the same as the servers'."""

__version__ = "0.1.0"
