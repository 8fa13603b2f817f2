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


@given(limit=st.integers(1, 60), size=st.integers(1, 40), max_bytes=st.integers(40, 2000), history=steps)
def test_bounds_hold_and_the_reader_never_starves(
    limit: int, size: int, max_bytes: int, history: list[tuple[str, int]]
) -> None:
    window = PullWindow(limit, max_bytes)
    open_pulls: list[list[int]] = []  # [left] of each, as a server keeps them
    buffered = 0

    def ask() -> None:
        pull = window.ask(buffered, buffered * size)
        if pull is not None:
            open_pulls.append([pull.batch])

    ask()
    for what, count in history:
        if what == "deliver":
            possible = min(count, sum(left for (left,) in open_pulls))
            for _ in range(possible):
                next(pull for pull in open_pulls if pull[0])[0] -= 1
            if possible:
                buffered += possible
                window.delivered(possible, size)
        elif what == "read":
            buffered -= min(count, buffered)
        elif what == "expire" and open_pulls:
            (left,) = open_pulls.pop(0)
            window.asked = max(0, window.asked - left)
        elif what == "void":
            open_pulls.clear()
            window.void()
        ask()
        assert window.asked == sum(left for (left,) in open_pulls)
        assert buffered + window.asked <= limit
        if buffered == 0:
            assert window.asked > 0


def test_expiry_in_the_property_is_what_answered_does() -> None:
    window = PullWindow(10, 1000)
    pull = window.ask(0, 0)
    assert pull is not None
    window.delivered(4, 1)
    window.answered(pull, Status(408, "Request Timeout", 6))
    assert window.asked == 0
