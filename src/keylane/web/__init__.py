"""One page that shows every group of an account, live, and lets an operator act (docs/web.md).

`page_server` serves it. `account_watch` reads the account for all browsers together; `page_view`, `timeline`,
`move_texts` and `merge_patch` say what is shown and what has changed. `actions` is what an operator may do, `access`
who may. The files of the page are in `static`: plain modules and style sheets, which need no build.
"""

from __future__ import annotations

from keylane.lazy import public_names
from keylane.web.page_server import serve_page

__all__ = ["serve_page"]

__dir__ = public_names(__all__)
