"""`keylane consumer`: one consumer, or all of a stream, and which client is pinned."""
