"""How surely wrong products are found, and that right ones are never called wrong: `run.py` writes results.json."""
