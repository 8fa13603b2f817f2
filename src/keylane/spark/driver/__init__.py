"""What the driver does for a read: options, plans, offsets, the lease of a query, and what it tells the stream."""
