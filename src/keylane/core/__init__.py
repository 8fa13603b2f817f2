"""Pure rules: no I/O, no async, no clock, no random. Standard library only."""
