"""Whatever happens, a window never holds more than it may and never stops asking for good."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.pulls import PullWindow, Status

steps = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(1, 50)),
        st.tuples(st.just("read"), st.integers(1, 50)),
        st.tuples(st.just("expire"), st.just(0)),
        st.tuples(st.just("void"), st.just(0)),
    ),
    max_size=80,
)


class Server:
    """Open pulls as a server keeps them, and a reader's buffer."""

    def __init__(self, window: PullWindow, size: int) -> None:
        self.window = window
        self.size = size
        self.left: list[int] = []
        self.buffered = 0
        self.ask()

    def ask(self) -> None:
        pull = self.window.ask(self.buffered, self.buffered * self.size)
        if pull is not None:
            self.left.append(pull.batch)

    def deliver(self, count: int) -> None:
        sent = 0
        while sent < count and any(self.left):
            oldest = next(index for index, left in enumerate(self.left) if left)
            self.left[oldest] -= 1
            sent += 1
        if sent:
            self.buffered += sent
            self.window.delivered(sent, self.size)

    def read(self, count: int) -> None:
        self.buffered -= min(count, self.buffered)

    def expire(self, _: int) -> None:
        if self.left:
            self.window.asked = max(0, self.window.asked - self.left.pop(0))

    def void(self, _: int) -> None:
        self.left.clear()
        self.window.void()


@given(limit=st.integers(1, 60), size=st.integers(1, 40), max_bytes=st.integers(40, 2000), history=steps)
def test_bounds_hold_and_the_reader_never_starves(
    limit: int, size: int, max_bytes: int, history: list[tuple[str, int]]
) -> None:
    server = Server(PullWindow(limit, max_bytes), size)
    for what, count in history:
        getattr(server, what)(count)
        server.ask()
        assert server.window.asked == sum(server.left)
        assert server.buffered + server.window.asked <= limit
        if server.buffered == 0:
            assert server.window.asked > 0


def test_expiry_in_the_property_is_what_answered_does() -> None:
    window = PullWindow(10, 1000)
    pull = window.ask(0, 0)
    assert pull is not None
    window.delivered(4, 1)
    window.answered(pull, Status(408, "Request Timeout", 6))
    assert window.asked == 0
