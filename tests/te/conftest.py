"""The tests in `inside` run in a process of their own, which test_te.py starts."""

from __future__ import annotations

import os

collect_ignore = [] if "INSIDE_EMULATED_TE" in os.environ else ["inside"]
