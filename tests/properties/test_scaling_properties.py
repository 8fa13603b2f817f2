"""The scaling rule holds its promises for every course of events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keylane.core.member_pool import chosen_members
from keylane.core.scaling import LoadObservation, ScalingRule, ScalingState, step

PARTITIONS = 12

rules = st.builds(
    lambda low, more, target_s, window_s, target_lag: ScalingRule(
        target_s=target_s, min_workers=low, max_workers=low + more, window_s=window_s, target_lag=target_lag
    ),
    st.integers(1, 6),
    st.integers(0, 12),
    st.floats(1, 300),
    st.floats(1, 300),
    st.none() | st.integers(1, 10_000),
)
looks = st.lists(
    st.tuples(
        st.floats(0.5, 100),  # seconds since the last look
        st.none() | st.integers(0, 5_000),  # lag
        st.none() | st.floats(0, 600),  # its age
        st.integers(0, PARTITIONS),  # lagging
        st.none() | st.integers(0, 3_000),  # arrived since
        st.booleans(),  # all are at work
        st.sampled_from([None, None, None, "paused"]),
    ),
    max_size=40,
)


@given(rules, looks, st.integers(0, 20), st.booleans())
def test_limits_windows_and_unknown(rule: ScalingRule, course: list[tuple], workers: int, remembers: bool) -> None:  # type: ignore[type-arg]
    state = ScalingState()
    at_s, arrived, changed_at_s = 0.0, 0, 0.0
    for number, (passed_s, lag, lag_s, lagging, more, all_work, problem) in enumerate(course):
        at_s += passed_s
        changed_at_s = at_s if number == 0 else changed_at_s
        arrived += more or 0
        now = LoadObservation(
            at_s,
            workers,
            workers if all_work else workers // 2,
            PARTITIONS,
            lagging,
            lag,
            lag_s,
            arrived if more is not None else None,
            problem,
        )
        state, decision = step(rule, state, now)
        assert decision.wanted - workers == decision.change
        if not decision.change:
            continue
        assert problem is None
        assert at_s - changed_at_s >= rule.window_s
        assert rule.min_workers <= decision.wanted <= max(rule.min_workers, min(rule.max_workers, PARTITIONS))
        was_within = rule.min_workers <= workers <= max(rule.min_workers, min(rule.max_workers, PARTITIONS))
        if was_within:
            assert lag is not None
            assert lag_s is not None
            assert decision.change < 0 or decision.wanted <= lagging
        workers, changed_at_s = decision.wanted, at_s
        state = state.changed(workers if remembers else None, at_s)


names = st.lists(st.sampled_from("abcdefgh"), unique=True)


@given(names, names, st.integers(0, 10), st.none() | st.sets(st.sampled_from("abcdefgh")), names)
def test_members_are_chosen_from_the_pool_alone(
    members: list[str], pool: list[str], wanted: int, running: set[str] | None, dead: list[str]
) -> None:
    chosen = chosen_members(members, pool, wanted, running=running, dead=dead)
    assert len(set(chosen)) == len(chosen)
    fixed = {one for one in members if one not in pool}
    assert fixed <= set(chosen) <= {*members, *pool}
    added = set(chosen) - set(members)
    assert running is None or added <= running
    assert len(chosen) <= max(wanted, len(fixed))
    spare = [one for one in pool if one not in members and (running is None or one in running)]
    assert len(chosen) >= min(wanted, len(members) + len(spare)) - len({*dead} & {*members} & {*pool})
    if not added and wanted >= len(members):
        assert set(chosen) == set(members), "nobody is dropped without somebody in the place"
