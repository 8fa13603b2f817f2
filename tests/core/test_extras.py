"""What is said to be installed where an optional dependency is missing works: from an index and from a checkout."""

from __future__ import annotations

from pathlib import Path

from keylane.extras import extra_missing, install_command

CHECKOUT = Path(__file__).parents[2]


def test_a_checkout_is_installed_by_its_path() -> None:
    assert install_command("spark") == f"pip install -e '{CHECKOUT}[spark]'"
    assert str(extra_missing("charts need matplotlib", "charts")).startswith(
        "charts need matplotlib: pip install -e '/"
    )


def test_elsewhere_both_ways_are_named(tmp_path: Path) -> None:
    said = install_command("spark", tmp_path / "site-packages" / "keylane")
    assert said == "pip install 'keylane[spark]', or in a checkout pip install '.[spark]'"
