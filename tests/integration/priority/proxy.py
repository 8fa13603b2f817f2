"""A TCP proxy between clients and a server that can lose what is sent, and then the links."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

_CHUNK = 64 * 1024


class LossyProxy:
    """Forwards every byte, until told to lose those of the server. A cut link can be dialled again."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._losing = False
        self._swallowing = False
        self._closed = False
        self.lost = asyncio.Event()
        """Bytes of the server were lost."""

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def lose(self) -> None:
        """From now on the client hears nothing of what the server sends on the present link."""
        self._losing = True

    def swallow(self) -> None:
        """From now on nothing gets through, in neither direction and on new links as well, and nobody is told."""
        self._swallowing = True

    def cut(self, *, for_good: bool = False) -> None:
        """End the link; the next one loses nothing. For good: there is no next one until `mend`."""
        self._closed = for_good
        for writer in list(self._writers):
            writer.transport.abort()
        self._losing = self._swallowing = False

    def mend(self) -> None:
        self._closed = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, up_writer}
        for work in (self._pump(reader, up_writer, lossy=False), self._pump(up_reader, writer, lossy=True)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool) -> None:
        try:
            while data := await reader.read(_CHUNK):
                if self._swallowing or (lossy and self._losing):
                    self.lost.set()
                    continue
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the link was cut, here or there
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
