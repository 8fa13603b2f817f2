"""An audit that follows a stream, in a process of its own: for tests that kill it. It says what the audit says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from keylane.spark.address import Address
from keylane.spark.pipelines import audit
from tests.peers.spark import spark_session


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(directory: Path, url: str, asked: dict[str, Any]) -> None:
    with spark_session(directory) as spark:
        audit.run(spark, audit.Settings(address=Address(url=url), follow=True, **asked), say)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
