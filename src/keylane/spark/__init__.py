"""JetStream streams in Spark: the data source, the sink and the pipelines built on them."""
