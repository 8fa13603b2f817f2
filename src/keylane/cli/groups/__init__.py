"""`keylane static` and `keylane elastic`: consumer groups."""
