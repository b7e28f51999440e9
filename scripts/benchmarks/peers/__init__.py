"""This package beside other tools on the same GPT."""
