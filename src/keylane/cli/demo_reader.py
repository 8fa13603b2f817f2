"""A reader of the demo, a process of its own: handles orders and says so on standard output, line by line.

Ends when its standard input ends, so that none outlives the demo.
"""

from __future__ import annotations

import asyncio
import json
import sys

import keylane
from keylane import priority
from keylane.jetstream.feed import Feed


def _say(word: str, value: object = None) -> None:
    sys.stdout.write(json.dumps([word, value]) + "\n")
    sys.stdout.flush()


async def _handle(feed: Feed) -> None:
    async for batch in feed.batches(100):
        _say("handled", [[message.subject.rpartition(".")[2], message.sequence] for message in batch])
        for message in batch:
            message.ack()


async def _until_told() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def read(url: str, stream: str, consumer: str) -> None:
    async with (
        await keylane.connect(url) as connection,
        await priority.consume(
            connection,
            stream,
            consumer,
            max_messages=200,
            on_pinned=lambda _: _say("active"),
            on_unpinned=lambda _: _say("standby"),
        ) as feed,
    ):
        _say("standby")
        handling = asyncio.create_task(_handle(feed))
        told = asyncio.create_task(_until_told())
        await asyncio.wait({handling, told}, return_when=asyncio.FIRST_COMPLETED)
        if handling.done():
            handling.result()
        await feed.close()
        await handling


if __name__ == "__main__":
    asyncio.run(read(*sys.argv[1:4]))
