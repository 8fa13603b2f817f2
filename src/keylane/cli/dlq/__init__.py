"""`keylane dlq`: dead letters."""
