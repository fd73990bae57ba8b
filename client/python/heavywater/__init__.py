"""Client of Heavywater, a distributed KV-cache service for long-context language models."""

from heavywater.attention import AttentionClient, OpenedAttention
from heavywater.attention_types import DECODE, PROMPT, PROMPT_LAST, AttentionItem, AttentionShape, ItemStatus, Kept
from heavywater.client import Client
from heavywater.errors import HeavywaterError
from heavywater.generation import Generation, Token
from heavywater.model import Model
from heavywater.security import Security
from heavywater.sets import SequenceSet
from heavywater.v1.common_pb2 import PolicyOptions
from heavywater.version import __version__

__all__ = [
    "DECODE",
    "PROMPT",
    "PROMPT_LAST",
    "AttentionClient",
    "AttentionItem",
    "AttentionShape",
    "Client",
    "Generation",
    "HeavywaterError",
    "ItemStatus",
    "Kept",
    "Model",
    "OpenedAttention",
    "PolicyOptions",
    "Security",
    "SequenceSet",
    "Token",
    "__version__",
]
