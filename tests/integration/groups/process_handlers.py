"""Handlers for other processes: those must be able to import them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import NoReturn

from keylane.groups import GroupMessage
from tests.integration.odd_handlers import Odd


class Unsendable(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def append(message: GroupMessage, more: str = "") -> None:
    """Write one line to the file that the message's header names. One write: lines of many processes do not mix."""
    line = f"{os.getpid()} {message.key} {message.sequence} {more}\n"
    with open(message.headers["File"], "a", encoding="utf-8") as file:
        file.write(line)


def work(message: GroupMessage) -> None:
    """What the data says, and a line for what was done."""
    do = message.data.decode()
    if do == "slowly":
        time.sleep(0.2)
    elif do and not first_time(message):
        pass
    elif do == "raise":
        raise ValueError("in the other process")
    elif do == "raise unsendable":
        raise Unsendable(1, 2)
    elif do == "odd":
        raise Odd("in the other process")
    elif do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "exit":
        os._exit(3)
    elif do == "hang":
        append(message, "hangs")
        time.sleep(60)
    elif do == "ack":
        message.ack()
    append(message)


def first_time(message: GroupMessage) -> bool:
    marker = f"{message.headers['File']}.{message.sequence}"
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def describe(message: GroupMessage) -> None:
    origin = message.origin
    append(
        message,
        json.dumps(
            {
                "subject": message.subject,
                "partition": message.partition,
                "data": message.data.decode(),
                "headers": message.headers,
                "sequence": message.delivery_sequence,
                "delivered_count": message.delivered_count,
                "timestamp": message.timestamp.isoformat(),
                "member": f"{origin.stream}/{origin.group}/{origin.member}",
                "repr": repr(message),
            }
        ),
    )


def leave(_: GroupMessage) -> NoReturn:
    sys.exit(5)
