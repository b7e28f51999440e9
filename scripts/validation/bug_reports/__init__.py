"""Bugs of FP8, FP4 and mixed-precision training that people reported in public, as small trainings with a known answer."""
