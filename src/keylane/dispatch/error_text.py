"""An error as text for logs and headers. Never raises, even if `str` of a user's exception does."""

from __future__ import annotations

import re
import traceback

LINE_CHARS = 500
TRACEBACK_CHARS = 4000

_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def error_line(error: BaseException) -> str:
    """Type and text of an error in one line of at most 500 characters."""
    try:
        text = str(error)[: 4 * LINE_CHARS]
    except Exception as trouble:  # noqa: BLE001 - errors of users' own classes; the message must get away all the same
        text = f"(no text: {type(trouble).__name__})"
    line = _NOT_SHOWN.sub("?", " ".join(f"{type(error).__qualname__}: {text}".split())).removesuffix(":")
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 1]}…"


def traceback_text(error: BaseException, most: int = TRACEBACK_CHARS) -> str:
    """The traceback of an error, with its causes. Only the end of a long one, which names the line that raised."""
    try:
        text = "".join(traceback.format_exception(error)).rstrip("\n")
    except Exception as trouble:  # noqa: BLE001 - as above
        text = f"(no traceback: {type(trouble).__name__})"
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"
