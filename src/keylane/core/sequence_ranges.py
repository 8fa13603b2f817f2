"""A set of ranges: which sequences of a stream are already covered. Pure.

A range is a pair (after, upto): everything above `after` up to and including `upto`, as a stream's offsets count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True, slots=True, init=False)
class Coverage:
    """Ranges in order, none empty, none touching the next. Two coverages of the same sequences are equal.

    >>> Coverage([(10, 20), (0, 10), (30, 40)])
    <Coverage 1-20 31-40>
    """

    spans: tuple[Span, ...]

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        object.__setattr__(self, "spans", tuple(_merged(spans)))

    def __repr__(self) -> str:
        return f"<Coverage {self or 'nothing'}>"

    def __str__(self) -> str:
        return " ".join(f"{after + 1}-{upto}" for after, upto in self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    @property
    def last(self) -> int:
        """The highest covered sequence; 0 if there is none."""
        return self.spans[-1][1] if self.spans else 0

    def with_span(self, span: Span) -> Coverage:
        return Coverage((*self.spans, span))

    def missing(self, span: Span) -> tuple[Span, ...]:
        """The parts of a range that are not covered.

        >>> Coverage([(10, 20)]).missing((5, 30))
        ((5, 10), (20, 30))
        """
        found = []
        after, upto = span
        for low, high in self.spans:
            if high <= after:
                continue
            if low >= upto:
                break
            if low > after:
                found.append((after, low))
            after = high
        if after < upto:
            found.append((after, upto))
        return tuple(found)

    def touches(self, span: Span) -> bool:
        """Whether some sequence of the range is covered."""
        return span[0] < span[1] and self.missing(span) != (span,)


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    current: Span | None = None
    for after, upto in sorted(spans):
        if after < 0 or upto < after:
            raise ValueError(f"({after}, {upto}] is not a range")
        if upto == after:
            continue
        if current is None:
            current = (after, upto)
        elif after <= current[1]:
            current = (current[0], max(current[1], upto))
        else:
            yield current
            current = (after, upto)
    if current is not None:
        yield current
