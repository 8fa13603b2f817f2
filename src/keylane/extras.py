"""The optional dependencies: what to install where one is missing, from an index or from a checkout."""

from __future__ import annotations

from pathlib import Path

from keylane.errors import ExtraMissing

_PACKAGE = Path(__file__).parent


def extra_missing(problem: str, extra: str) -> ExtraMissing:
    """The error for a missing dependency: what needs it, and the command that installs it."""
    return ExtraMissing(f"{problem}: {install_command(extra)}")


def install_command(extra: str, package: Path = _PACKAGE) -> str:
    """What installs an extra of this keylane. A checkout is named by its path, which works where no index has keylane.

    >>> install_command("spark", Path("/usr/lib/python3/site-packages/keylane"))
    "pip install 'keylane[spark]', or in a checkout pip install '.[spark]'"
    """
    checkout = package.parent.parent
    if (checkout / "pyproject.toml").is_file() and package.parent.name == "src":
        return f"pip install -e '{checkout}[{extra}]'"
    return f"pip install 'keylane[{extra}]', or in a checkout pip install '.[{extra}]'"
