"""`keylane demo`: members handle orders while one is killed, one added and one dropped."""
