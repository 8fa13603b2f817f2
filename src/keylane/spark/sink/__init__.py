"""Rows of Spark into a stream: what the driver checks, and how a task publishes."""
