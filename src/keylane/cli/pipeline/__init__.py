"""`keylane pipeline`: the pipelines on Spark."""
