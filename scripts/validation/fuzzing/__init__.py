"""Fuzzing of everything that comes from outside: targets, mutations, and limits that hold for each example."""
