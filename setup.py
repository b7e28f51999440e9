"""What setup.cfg cannot say: the README as a package index shows it, where links into the repository lead nowhere."""

import re
from pathlib import Path

from setuptools import setup


def for_an_index(readme: str) -> str:
    """Without pictures of the repository, and with the path of a page instead of a link to it."""
    readme = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)]*)\)", r"\1 (`\2`)", readme)


if __name__ == "__main__":
    setup(
        long_description=for_an_index(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
