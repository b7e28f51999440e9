"""The README's main job at full length, and what verdicts need of its records."""
