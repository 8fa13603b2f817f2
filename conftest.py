"""Loads the plugin that ties tests to the peers they need."""

pytest_plugins = ["tests.peers.plugin"]
