"""Loads the plugins that divide the suite and tie tests to the peers they need."""

pytest_plugins = ["tests.peers.plugin", "tests.suite"]
