"""The Python session of a reader: runs the blocks that it is sent, one after the other, in one namespace and one loop.

A line of JSON on standard input is a block, and a line of JSON on the descriptor that the first argument names is what
became of it. Between blocks the event loop runs on, so a member that one block started works while the page goes on.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import os
import sys
import traceback
from typing import Any


async def serve(answers: int) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    while line := await asyncio.to_thread(sys.stdin.readline):
        block = json.loads(line)
        if (
            "environment" in block
        ):  # the next page: it has what the ones before have imported, and nothing that they named
            names = {"__name__": "__main__"}
            os.environ.update(block["environment"])
        error = await run(block["code"], block["where"], names)
        sys.stdout.flush()
        os.write(answers, json.dumps({"error": error}).encode() + b"\n")


async def run(code: str, where: str, names: dict[str, Any]) -> str | None:
    linecache.cache[where] = (len(code), None, code.splitlines(keepends=True), where)
    try:
        made = compile(code, where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(made, names)  # noqa: S307 - our own page
        if inspect.isawaitable(result):
            await result
    except Exception:  # noqa: BLE001 - the reader of the page is told
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
