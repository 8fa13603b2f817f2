"""One program per contestant: it connects, does the job once, and prints one line of JSON."""
