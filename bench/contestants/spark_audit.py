"""One audit in a Spark session of its own; prints the report as JSON, with the seconds that it took."""

from __future__ import annotations

import argparse
import json
import tempfile

from pyspark.sql import SparkSession

from keylane.spark.address import Address
from keylane.spark.pipelines import audit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--heap", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-audit-") as temporary:
        settings = {
            "spark.driver.memory": options.heap,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "16",
            "spark.local.dir": f"{temporary}/local",
            "spark.sql.warehouse.dir": f"{temporary}/warehouse",
            "spark.log.level": "ERROR",
        }
        builder = SparkSession.builder.master("local[2]").appName("bench audit")
        for name, value in settings.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            asked = audit.Settings(
                stream="ORDERS",
                group=options.group,
                address=Address(url=options.url),
                work=f"{temporary}/work",
                settle_s=0.0,
                complete=True,
            )
            print(json.dumps(audit.run(spark, asked).as_json()))
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
