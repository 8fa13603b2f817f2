"""Peers side by side, one command, one table: `.venv/bin/python -m bench ROW [--json]`."""
