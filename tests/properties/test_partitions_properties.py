"""What must hold for every partitioning, subject and transform, not only for the ones in the tables."""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st

from keylane.core.partitions import (
    MAX_PARTITIONS,
    Partitioning,
    insert_partition,
    parse_transform,
    partition_filters,
    partition_number,
    strip_partition,
)
from keylane.core.subjects import check_subject, is_subset, matches
from keylane.errors import InvalidInput

TOKENS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Zs", "Zl", "Zp"], exclude_characters=".*>${"),
    min_size=1,
    max_size=6,
)
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=6).map(".".join)
COUNTS = st.one_of(st.integers(1, 300), st.integers(1, MAX_PARTITIONS))


@st.composite
def partitionings(draw: st.DrawFn) -> Partitioning:
    parts = draw(st.lists(st.one_of(st.just("*"), TOKENS), min_size=1, max_size=5))
    if draw(st.booleans()):
        parts.append(">")
    stars = parts.count("*")
    wildcards = draw(st.lists(st.integers(1, stars), unique=True)) if stars else []
    return Partitioning(".".join(parts), tuple(wildcards), draw(COUNTS))


@st.composite
def partitioned_subjects(draw: st.DrawFn) -> tuple[Partitioning, str]:
    spread = draw(partitionings())
    parts = [draw(TOKENS) if part == "*" else part for part in spread.filter.split(".")]
    if parts[-1] == ">":
        parts[-1:] = draw(st.lists(TOKENS, min_size=1, max_size=3))
    return spread, ".".join(parts)


def dumb_hash(data: bytes) -> int:
    """FNV-1a by its definition, with arithmetic in place of bit masks."""
    value = 2166136261
    for byte in data:
        value = (value ^ byte) * (2**24 + 2**8 + 0x93) % 2**32
    return value


@given(partitioned_subjects())
def test_every_partition_is_in_range_and_made_of_the_chosen_tokens(case: tuple[Partitioning, str]) -> None:
    spread, subject = case
    assert matches(spread.filter, subject)
    parts = subject.split(".")
    stars = [at for at, part in enumerate(spread.filter.split(".")) if part == "*"]
    hashed = "".join(parts[stars[wildcard - 1]] for wildcard in spread.wildcards) if spread.wildcards else subject
    assert 0 <= spread.partition(subject) < spread.partitions
    assert spread.partition(subject) == dumb_hash(hashed.encode()) % spread.partitions


@given(partitionings(), st.data())
def test_equal_keys_mean_equal_chosen_tokens_and_one_partition(spread: Partitioning, data: st.DataObject) -> None:
    letters = st.text("ab", min_size=1, max_size=2)

    def fill() -> str:
        parts = [data.draw(letters) if part == "*" else part for part in spread.filter.split(".")]
        return ".".join([*parts[:-1], data.draw(letters)] if parts[-1] == ">" else parts)

    one, other = fill(), fill()
    if spread.key(one) == spread.key(other):
        assert spread.partition(one) == spread.partition(other)
    if spread.wildcards:
        stars = [at for at, part in enumerate(spread.filter.split(".")) if part == "*"]
        chosen = [
            tuple(subject.split(".")[stars[wildcard - 1]] for wildcard in spread.wildcards) for subject in (one, other)
        ]
        assert (spread.key(one) == spread.key(other)) == (chosen[0] == chosen[1])


@given(st.integers(0, MAX_PARTITIONS - 1), SUBJECTS)
def test_stripping_undoes_inserting(partition: int, subject: str) -> None:
    assert strip_partition(insert_partition(partition, subject)) == (partition, subject)


@given(st.one_of(st.text(max_size=8), st.text("0123456789.a-+ _", max_size=8)))
@example("0.a")
@example("12.a.b")
def test_inserting_undoes_stripping(subject: str) -> None:
    try:
        stripped = strip_partition(subject)
    except InvalidInput:
        return
    assert insert_partition(*stripped) == subject


@given(partitionings())
def test_parsing_undoes_building(spread: Partitioning) -> None:
    assert parse_transform(spread.filter, spread.destination) == spread


@given(partitioned_subjects(), st.data())
def test_a_renamed_subject_keeps_key_and_partition(case: tuple[Partitioning, str], data: st.DataObject) -> None:
    """A transform that renames and reorders is applied by hand: key and partition come out as before."""
    spread, subject = case
    assume(spread.wildcards)
    stars = [at for at, part in enumerate(spread.filter.split(".")) if part == "*"]
    order = data.draw(st.permutations(range(1, len(stars) + 1)))
    spelling = data.draw(st.sampled_from(["{{{{Wildcard({})}}}}", "{{{{ wildcard( {} ) }}}}", "${}"]))
    tail = spread.filter.endswith(">")
    numbers = ", ".join(map(str, (spread.partitions, *spread.wildcards)))
    rest = ["renamed", *(spelling.format(number) for number in order), *([">"] if tail else [])]
    parsed = parse_transform(spread.filter, ".".join([f"{{{{ partition({numbers}) }}}}", *rest]))
    assert parsed is not None

    parts = subject.split(".")
    behind = parts[len(spread.filter.split(".")) - 1 :] if tail else []
    stored = ".".join(["renamed", *(parts[stars[number - 1]] for number in order), *behind])
    assert parsed.key(stored) == spread.key(subject)
    assert parsed.partition(stored) == spread.partition(subject)


PIECES = [
    "{{Partition(",
    "{{ partition (",
    "{{Wildcard(",
    "{{Left(",
    ")}}.",
    ") }}",
    "1",
    "2",
    "0",
    "-",
    ",",
    " ",
]
DESTINATIONS = st.lists(st.sampled_from([*PIECES, ".", "$", "*", ">", "a", "{{", "}}"]), max_size=14).map("".join)


@given(st.sampled_from(["a.*", "a.*.*", "a.>", "a", "", ">"]), st.one_of(st.text(max_size=20), DESTINATIONS))
@example("a.*", "{{partition(7,1)}}.a.{{wildcard(1)}}")
def test_parsing_any_text_answers_or_refuses(source: str, destination: str) -> None:
    try:
        parsed = parse_transform(source, destination)
    except InvalidInput:
        return
    assert parsed is None or parsed.partitions >= 1


@given(st.sets(st.integers(0, 200), min_size=1), st.lists(TOKENS, unique=True, max_size=4))
def test_partition_filters_ascend_within_each_filter(owned: set[int], filters: list[str]) -> None:
    made = partition_filters(owned, filters)
    chosen = filters or [">"]
    assert len(set(made)) == len(made) == len(owned) * len(chosen)
    for at, subject_filter in enumerate(chosen):
        numbers = [strip_partition(text) for text in made[at * len(owned) : (at + 1) * len(owned)]]
        assert numbers == [(partition, subject_filter) for partition in sorted(owned)]
    assert not any(is_subset(a, b) for a in made for b in made if a is not b)


@given(TOKENS, st.integers(1, MAX_PARTITIONS))
def test_tokens_of_these_tests_are_publishable_and_in_range(token: str, partitions: int) -> None:
    assert check_subject(token) == token
    assert 0 <= partition_number(token, partitions) < partitions
