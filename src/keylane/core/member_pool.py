"""Which members an elastic group should list, of a pool of names that may be added and dropped. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def chosen_members(
    members: Sequence[str],
    pool: Sequence[str],
    wanted: int,
    *,
    running: Collection[str] | None,
    dead: Collection[str] = (),
) -> list[str]:
    """The members that the group should list, `wanted` of them if the pool has so many.

    Members that are not of the pool stay, whatever happens. `running`: names that have a process; a name without one
    is not added, as its partitions would have no owner. None: nobody can tell, and every name of the pool is taken for
    running. `dead` ones of the pool are dropped first, but only if others can take their places.

    >>> chosen_members(["a", "b"], ["a", "b", "c", "d"], 3, running={"a", "b", "d"})
    ['a', 'b', 'd']
    >>> chosen_members(["a", "b"], ["a", "b", "c"], 2, running={"b", "c"}, dead={"a"})
    ['b', 'c']
    >>> chosen_members(["x", "a", "b"], ["a", "b"], 1, running={"a", "b"})
    ['x']
    """
    spare = [one for one in dict.fromkeys(pool) if one not in members and (running is None or one in running)]
    healthy = [one for one in members if one not in dead or one not in pool]
    replaceable = [one for one in members if one not in healthy]
    kept = healthy
    missing = wanted - len(kept)
    if missing > 0:
        added = spare[:missing]
        kept = [*(one for one in members if one in healthy or one in replaceable[: missing - len(added)]), *added]
    droppable = [one for one in reversed(pool) if one in kept]
    surplus = droppable[: max(0, len(kept) - wanted)]
    return [one for one in kept if one not in surplus]
