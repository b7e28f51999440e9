"""Runs of models that no rule of `diagnose` was made with, drawn by seed: `python -m held_out --help`."""

from __future__ import annotations

from fault_injection.families import add_families

from held_out.families import MODULES

add_families(MODULES)
