"""A crowd of streams whose rows never come, in a process of its own: `idle_streams.py ADDRESS CA_FILE TOKEN COUNT`.

Says "open" once they are, and holds them until its input ends. Fails when one has ended by itself. In the process of
the tests, what is left of so many asyncio calls would go on writing to an event loop that is gone.
"""

from __future__ import annotations

import asyncio
import sys

from heavywater import Security
from heavywater.v1 import page_store_pb2_grpc

PER_CONNECTION = 500
SETTLED_S = 3


async def hold(address: str, security: Security, count: int) -> None:
    own = (("grpc.use_local_subchannel_pool", 1),)
    channels = [security.aio_channel(address, own) for _ in range(count // PER_CONNECTION)]
    stubs = [page_store_pb2_grpc.PageStoreServiceStub(channel) for channel in channels]
    calls = [stub.Write() for stub in stubs for _ in range(PER_CONNECTION)]
    await asyncio.sleep(SETTLED_S)
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    assert not any(call.done() for call in calls), "a stream has ended"
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    address, ca_file, token, count = sys.argv[1:]
    asyncio.run(hold(address, Security(ca_file=ca_file, token=token), int(count)))
