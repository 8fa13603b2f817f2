"""The program that `spark-submit` runs on a cluster. Its arguments are those of `keylane pipeline`.

    keylane spark submit --master spark://HOST:7077 --env env.tar.gz "$(keylane pipeline program)" \\
        run audit --stream ORDERS --group billing --server nats://HOST:4222
"""

from __future__ import annotations

import sys


def main() -> None:
    from keylane.cli.main import main as command

    sys.argv[1:1] = ["pipeline"]
    command()


if __name__ == "__main__":
    main()
