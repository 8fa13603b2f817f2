"""Who may commit: tokens in both orders, and the interleavings of an old owner and a new one."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from keylane.errors import Fenced
from keylane.exactly_once import ExactlyOnce
from keylane.groups import GroupMessage
from tests.integration.exactly_once.rig import Database, Instance, set_to_begin_by_itself, write, write_plainly
from tests.waiter import until


class Held:
    """An effect that waits in the middle until it is let go."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, message: GroupMessage, connection: AsyncConnection) -> None:
        await write(message, connection, "held")
        self.reached.set()
        await self.go_on.wait()


def patient(database: Database) -> ExactlyOnce:
    """For effects that are held up on a slow machine."""
    return ExactlyOnce(database.engine(), lock_timeout_s=30, idle_timeout_s=60)


def sequences(database: Database) -> list[int]:
    return [sequence for _, sequence, _ in database.rows()]


async def test_a_message_that_comes_again_is_recognised(database: Database) -> None:
    called = []

    async def effect(message: GroupMessage, connection: AsyncConnection) -> None:
        called.append(message.delivery_sequence)
        await write(message, connection)

    owner = Instance(5, 100)
    handle = ExactlyOnce(database.engine()).handler(effect)
    for sequence in (1, 2, 2, 1, 3):
        await handle(owner.message(sequence))
    await handle(owner.message(2, key="other"))
    assert called == sequences(database) == [1, 2, 3, 2]
    assert owner.asked == 1, "once per pin and partition"
    assert database.ask("SELECT partition, lane, sequence FROM keylane_progress ORDER BY lane") == [
        (3, "k", 3),
        (3, "other", 2),
    ]


async def test_plain_functions_and_a_plain_engine(database: Database) -> None:
    handle = ExactlyOnce(database.plain_engine()).handler(write_plainly)
    owner, later = Instance(5, 100), Instance(5, 200)
    for sequence in (1, 1, 2):
        await handle(owner.message(sequence))
    await handle(later.message(3))
    with pytest.raises(Fenced):
        await handle(owner.message(4))
    assert sequences(database) == [1, 2, 3]


async def test_one_key_in_two_partitions_has_two_lanes(database: Database) -> None:
    handle = ExactlyOnce(database.engine()).handler(write)
    owner = Instance(5, 100)
    await handle(owner.message(5, partition=1))
    await handle(owner.message(3, partition=2))
    assert sequences(database) == [5, 3]


async def test_keys_that_are_not_text_stay_apart(database: Database) -> None:
    handle = ExactlyOnce(database.engine()).handler(write_anything)
    owner = Instance(5, 100)
    for number, key in enumerate(["a\udcff", "a\\udcff", "a\0", "a\\0"]):
        await handle(owner.message(9 - number, key=key))
    assert sequences(database) == [9, 8, 7, 6]


async def write_anything(message: GroupMessage, connection: AsyncConnection) -> None:
    await connection.exec_driver_sql(
        f"INSERT INTO effects (lane, sequence, who) VALUES ('x', {message.sequence}, '')"  # noqa: S608
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Instance(5, 100), Instance(5, 200)),
        (Instance(5, 900), Instance(6, 200, member="m2")),
        (Instance(5, 100), Instance(6, 100)),
    ],
    ids=["later pin", "later revision, other member", "later revision, same pin time"],
)
async def test_the_old_owner_cannot_commit_after_the_new_one(database: Database, old: Instance, new: Instance) -> None:
    before, after = ExactlyOnce(database.engine()), ExactlyOnce(database.engine())
    old.record = None
    await before.handler(write)(old.message(1))
    await after.handler(write)(new.message(2))
    old.record = new.revision
    for key in ("k", "another"):
        with pytest.raises(Fenced, match=rf"partition 3 of ORDERS/billing belongs to {new.member} \(revision"):
            await before.handler(write)(old.message(3, key=key))
    await before.handler(write)(old.message(4, partition=7))
    await after.handler(write)(new.message(5))
    assert sequences(database) == [1, 2, 4, 5]


async def test_an_old_owner_that_never_wrote_cannot_begin(database: Database) -> None:
    await ExactlyOnce(database.engine()).handler(write)(Instance(5, 200).message(2))
    with pytest.raises(Fenced):
        await ExactlyOnce(database.engine()).handler(write)(Instance(5, 100).message(3))
    assert sequences(database) == [2]


async def test_a_partition_that_comes_back_is_claimed_again(database: Database) -> None:
    first, second = ExactlyOnce(database.engine()), ExactlyOnce(database.engine())
    mine, other = Instance(5, 100), Instance(6, 50, member="m2")
    await first.handler(write)(mine.message(1))
    await second.handler(write)(other.message(2))
    mine.revision = other.record = 7
    await first.handler(write)(mine.message(3))
    with pytest.raises(Fenced):
        await second.handler(write)(other.message(4))
    assert sequences(database) == [1, 2, 3]


async def test_within_a_revision_pins_of_two_members_are_not_compared(database: Database) -> None:
    """The old owner may have read the new revision before it let go, with a pin that is younger than the new one's."""
    leaving, coming = Instance(6, 900, member="m1"), Instance(6, 50, member="m2")
    await ExactlyOnce(database.engine()).handler(write)(leaving.message(1))
    await ExactlyOnce(database.engine()).handler(write)(coming.message(2))
    assert sequences(database) == [1, 2]


async def test_what_an_earlier_pin_brought_is_refused(database: Database) -> None:
    handle = ExactlyOnce(database.engine()).handler(write)
    owner = Instance(5, 100)
    late = owner.message(1)
    owner.pin_id, owner.pinned_ns = "next", 300
    with pytest.raises(Fenced, match="was delivered to pin"):
        await handle(late)
    owner.pin_id = None
    with pytest.raises(Fenced):
        await handle(owner.message(1, pin_id="gone"))
    assert sequences(database) == []


async def test_the_pin_changes_while_it_is_asked_for(database: Database) -> None:
    class Moving(Instance):
        async def fence(self, *, anew: bool = False) -> tuple[int, int]:
            token = await Instance.fence(self, anew=anew)
            self.pin_id = "another"
            return token

    with pytest.raises(Fenced):
        await ExactlyOnce(database.engine()).handler(write)(Moving(5, 100).message(1))
    assert sequences(database) == []


async def test_the_new_owner_waits_for_an_old_transaction_that_passed_its_check(on_postgres: Database) -> None:
    """The old one's commit comes before the new one's claim, never after its first commit."""
    before, after = patient(on_postgres), patient(on_postgres)
    old, new = Instance(5, 100), Instance(5, 200)
    held = Held()
    at_work = asyncio.create_task(before.handler(held)(old.message(1)))
    await held.reached.wait()
    taking = asyncio.create_task(after.handler(write)(new.message(1)))
    await until_waiting_for_a_lock(on_postgres)
    assert not taking.done()
    held.go_on.set()
    await asyncio.gather(at_work, taking)
    with pytest.raises(Fenced):
        await before.handler(write)(old.message(2))
    assert on_postgres.rows() == [("k", 1, "held")], "the new owner saw that it was done"


async def test_an_old_transaction_that_hangs_blocks_the_new_owner_only_so_long(on_postgres: Database) -> None:
    before = ExactlyOnce(on_postgres.engine(), idle_timeout_s=6.0)
    after = ExactlyOnce(on_postgres.engine(), lock_timeout_s=0.2)
    old, new = Instance(5, 100), Instance(5, 200)
    held = Held()
    at_work = asyncio.create_task(before.handler(held)(old.message(1)))
    await held.reached.wait()
    with pytest.raises(OperationalError, match="lock timeout"):
        await after.handler(write)(new.message(1))
    async with asyncio.timeout(40):
        while True:
            try:
                await after.handler(write)(new.message(1))
            except OperationalError:
                continue
            break
    held.go_on.set()
    with pytest.raises(DBAPIError, match="idle-in-transaction timeout"):
        await at_work
    assert on_postgres.rows() == [("k", 1, "")]


async def test_keys_of_a_partition_are_at_work_at_once(on_postgres: Database) -> None:
    """From the first message on: whoever claims the partition does not make the others wait for its effect."""
    once = patient(on_postgres)
    owner = Instance(5, 100)
    held = [Held() for _ in range(8)]
    works = [
        asyncio.create_task(once.handler(one)(owner.message(1 + number, key=f"k{number}")))
        for number, one in enumerate(held)
    ]
    async with asyncio.timeout(20):
        for one in held:
            await one.reached.wait()
    assert on_postgres.rows() == []
    for one in held:
        one.go_on.set()
    await asyncio.gather(*works)
    assert sorted(sequences(on_postgres)) == list(range(1, 9))
    assert owner.asked == 1


async def test_one_message_in_two_transactions_has_one_effect(on_postgres: Database) -> None:
    """Without help from the fence: both are the same instance."""
    once = patient(on_postgres)
    owner = Instance(5, 100)
    one, other = Held(), Held()
    works = [asyncio.create_task(once.handler(held)(owner.message(1))) for held in (one, other)]
    async with asyncio.timeout(30):
        await one.reached.wait()
        await other.reached.wait()
    one.go_on.set()
    other.go_on.set()
    await asyncio.gather(*works)
    assert sequences(on_postgres) == [1]


async def test_a_forgotten_group_starts_anew(database: Database) -> None:
    once = ExactlyOnce(database.engine())
    owner, elsewhere = Instance(5, 100), Instance(5, 100, group="audit")
    handle = once.handler(write)
    await handle(owner.message(7, key="a"))
    await handle(owner.message(8, key="b"))
    await handle(elsewhere.message(8, key="b"))
    assert await once.forget("ORDERS", "billing") == 2
    await handle(owner.message(1, key="a"))
    await handle(elsewhere.message(8, key="b"))
    assert sequences(database) == [7, 8, 8, 1]


async def test_an_engine_whose_transactions_begin_by_themselves(on_sqlite: Database) -> None:
    engine = on_sqlite.engine()
    set_to_begin_by_itself(engine)
    handle = ExactlyOnce(engine).handler(write)
    owner = Instance(5, 100)
    await asyncio.gather(*(handle(owner.message(1 + number, key=f"k{number}")) for number in range(10)))
    assert sorted(sequences(on_sqlite)) == list(range(1, 11))


async def until_waiting_for_a_lock(database: Database) -> None:
    await until(lambda: database.ask("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"), deadline_s=30)
