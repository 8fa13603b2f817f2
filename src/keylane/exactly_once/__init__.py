"""Exactly once into a SQL database: a message's effects and the record that it is done, in one transaction.

`transactions` wraps the user's effect, `ledger` has the statements, `tables` the tables, `fencing` an instance's claims
of ownership. `double_ack` is the other pattern: prepare, double ack, commit or roll back.

Needs SQLAlchemy, which `import keylane` alone never loads.
"""

from __future__ import annotations

from keylane.extras import extra_missing
from keylane.lazy import public_names

try:
    from keylane.exactly_once.double_ack import ack_then_commit
    from keylane.exactly_once.transactions import ExactlyOnce
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "sqlalchemy":
        raise
    raise extra_missing("keylane.exactly_once needs SQLAlchemy, which is not installed", "sql") from error

__all__ = ["ExactlyOnce", "ack_then_commit"]

__dir__ = public_names(__all__)
