"""Who owns which partition: plans, what moves between two of them, and three ways to make one.

Owns: the `Plan`, its rules, and the planners `balanced`, `sticky` and `weighted`. Never stores a plan, never
knows whether a member is alive, and never measures a load.

- `balanced` is what members of every language compute by themselves from a list of names. It moves much:
  64 partitions from four to five members move 39.
- `sticky` has sizes just as even and moves the fewest partitions: 12 in the same case.
- `weighted` counts load in place of partitions and moves only what brings the heaviest member under a cap.

The last two depend on what was before, so they must be stored as member mappings; other languages then
follow them as they are. A member that owns nothing is left out of the mappings: a consumer with an empty list
of filters reads the whole stream, and that is what the Go library makes of an empty mapping.

All three take names in any order and count a name once. The same input gives the same plan, on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from keylane.core.loads import Spread, exact_loads, lightest_load, spread_evenly
from keylane.core.names import check_member_name
from keylane.core.partitions import check_partition_count
from keylane.core.subjects import shown
from keylane.errors import InvalidInput
