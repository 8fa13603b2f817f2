"""Messages between their delivery and their ack: what groups and fleets share above the dispatcher."""
