"""Runs the demo and draws its last screen as docs/images/demo.svg: `python scripts/demo_image.py`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from keylane.cli.demo.scenario import run_demo

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "demo.svg"


def svg_format() -> str:
    """Rich's, without fonts that a browser would fetch."""
    bare = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", bare).replace("Fira Code", "DejaVu Sans Mono")


def main() -> int:
    # Not a terminal: the live table is recorded once, as it is in the end.
    console = Console(record=True, width=86, file=io.StringIO())
    if not run_demo(console, 16.0, 1000, pipelines=False):
        print(console.export_text(), file=sys.stderr)
        return 1
    print(console.export_text(clear=False))
    IMAGE.write_text(console.export_svg(title="make demo", code_format=svg_format(), unique_id="demo"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
