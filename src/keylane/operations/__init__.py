"""What operators need across groups, fleets and streams: a diagnosis. The commands are in `keylane.cli`."""
