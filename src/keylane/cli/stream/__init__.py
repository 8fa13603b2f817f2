"""`keylane stream`: create, list, show and remove streams."""
