"""Client of Heavywater, a distributed KV-cache service for long-context language models."""

from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation, Token
from heavywater.model import Model
from heavywater.sets import SequenceSet
from heavywater.v1.common_pb2 import PolicyOptions
from heavywater.version import __version__

__all__ = [
    "Client",
    "Generation",
    "HeavywaterError",
    "Model",
    "PolicyOptions",
    "SequenceSet",
    "Token",
    "__version__",
]
