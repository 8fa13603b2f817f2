"""The driver's part of a read: plans, offsets, the lease of a query, and its progress."""
