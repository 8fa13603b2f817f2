"""The `keylane` command."""
