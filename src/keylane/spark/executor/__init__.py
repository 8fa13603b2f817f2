"""What a task does for a read: one split of a stream into Arrow batches, each message once and in order."""
