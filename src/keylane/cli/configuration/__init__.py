"""`keylane plan` and `keylane apply`: streams, groups and fleets from one file."""
