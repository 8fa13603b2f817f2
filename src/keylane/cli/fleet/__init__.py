"""`keylane fleet`: workers that share the partitions of a stream by themselves."""
