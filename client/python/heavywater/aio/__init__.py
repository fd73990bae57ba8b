"""The client for asyncio: the same names as the other one's, to be awaited.

from heavywater import aio

async with aio.Client(worker="127.0.0.1:7701", cache="127.0.0.1:7700") as client:
    async with client.generate("Once upon a time", max_new_tokens=16) as generation:
        async for token in generation:
            print(token.text, end="", flush=True)
"""

from heavywater.aio.client import Client
from heavywater.aio.generation import Generation

__all__ = ["Client", "Generation"]
