"""Asks the stream's leader whether a range was really read to its end.

Any replica may answer a direct get, and a consumer may live on any of them. One that lags behind ends early, and says
so in the same words as one that has everything. Only the leader knows better.
"""

from __future__ import annotations

from keylane.errors import NotFound
from keylane.jetstream import streams
from keylane.jetstream.connection import Connection
from keylane.spark.executor.split import Split

_NO_MESSAGE = 10037


async def what_is_missing(connection: Connection, split: Split, position: int) -> str | None:
    """Why a reader that has everything up to `position` is not done; None if it is.

    What was deleted since the split was planned is not missing.
    """
    stream = split.reading.stream
    request = {"seq": position + 1, "next_by_subj": split.subject_filter or ">"}
    try:
        answer = await connection.api.request(f"STREAM.MSG.GET.{stream}", request)
    except NotFound as error:
        if error.err_code != _NO_MESSAGE:
            raise
    else:
        following = int(answer["message"]["seq"])
        return f"sequence {following}, which the leader has" if following <= split.upto else None
    # A leader that was just chosen may not have stored yet what the one before it had confirmed.
    newest = (await streams.state(connection, stream)).last_sequence
    goal = min(split.last, split.upto)
    return f"sequence {goal}: the leader itself is only at {newest}" if newest < goal else None
