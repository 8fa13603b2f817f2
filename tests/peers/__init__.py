"""The other programs that tests run against: Go members, Apache Kafka, Spark and the Java below them.

A peer is a real program, found on the machine or fetched once into `.peers/`. Nothing here imitates one.
"""
