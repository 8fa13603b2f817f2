"""Worker pools: a labelled partition goes only to workers with its label, and waits for them for a while."""

from __future__ import annotations

from keylane.fleet import listed
from tests.integration.fleet.rig import FleetGround
from tests.integration.groups.conftest import MakeGround
from tests.waiter import until


async def test_a_labelled_partition_waits_for_its_pool(make: MakeGround) -> None:
    ground = FleetGround(await make())
    subjects = [f"{ground.stream}.k{number}" for number in range(6)]
    source = listed(subjects, labels={subjects[0]: "gpu", subjects[1]: "gpu"})
    by_subject = {one.filter: one.id for one in source.resolve().partitions}
    gpu = {by_subject[subjects[0]], by_subject[subjects[1]]}
    a = await ground.join("a", partitions=source, labels=["gpu"])
    b = await ground.join("b", partitions=source)
    owned = await until(
        lambda: (set(a.partitions), set(b.partitions)), lambda seen: all(seen) and len(seen[0] | seen[1]) == 6
    )
    assert gpu <= owned[0]
    await a.stop()
    await until(lambda: set(b.partitions) == set(by_subject.values()) - gpu)
    sent = await ground.publish([f"k{number}" for number in range(6)])
    await ground.evidence.until(lambda lines: len(lines) == 4)
    c = await ground.join("c", partitions=source, labels=["gpu"])
    await until(lambda: gpu <= set(c.partitions))
    await ground.evidence.all_of(sent)
    assert {line.by for line in ground.evidence.lines if line.subject in subjects[:2]} == {"c"}
