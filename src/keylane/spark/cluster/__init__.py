"""Java, packed environments and `spark-submit`: what a cluster needs before keylane runs on it."""
