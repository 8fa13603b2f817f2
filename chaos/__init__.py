"""Trouble on purpose, judged by evidence: `.venv/bin/python -m chaos rebalance --seconds 60 --seed 1`."""
