"""`keylane run`: the processes of an app."""
