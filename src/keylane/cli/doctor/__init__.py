"""`keylane doctor`: what is wrong, why it matters, and what fixes it."""
