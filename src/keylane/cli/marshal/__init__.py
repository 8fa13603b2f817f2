"""`keylane marshal`: consumers coordinated by a log."""
