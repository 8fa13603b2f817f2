"""The JetStream adapter: connection, API, consumers, feed, publishing."""
