"""Setups whose records same_records.py makes, and how it compares two records."""
