#!/usr/bin/env python3
"""Carries out the Dockerfile without Docker: in a fresh Debian made by mmdebstrap, in a chroot. As root, about 15 minutes.

    apt-get install mmdebstrap
    scripts/validation/dockerfile.py --target demo --build-arg DEMO="--steps 20"

COPY takes what git has committed. A machine whose packages come from elsewhere brings what says so: --bring names files
and folders that are put at the same place there, --variable names variables that RUN gets.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: what RUN runs in: /proc and /dev as in a container; all is unmounted with the namespace
ENTER = 'mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" /bin/sh -ec "$1"'


def instructions(text: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with its arguments in one line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


class Image:
    """A folder with a Debian in it, and what instructions have set."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self.directory = "/"
        self.values = {name: os.environ[name] for name in arguments.variable if name in os.environ}
        self.given = dict(text.split("=", 1) for text in arguments.build_arg)
        self.brought = [Path(path) for path in arguments.bring]

    def debian(self, base: str) -> None:
        suite = re.fullmatch(r"debian:([a-z]+)[\w.-]*(@sha256:\w+)?", base)
        if not suite:
            raise SystemExit(f"only FROM debian:NAME can be made here, and not {base!r}")
        subprocess.run(["mmdebstrap", "--variant=minbase", suite[1], self.folder], check=True)
        for path in (Path("/etc/resolv.conf"), *self.brought):
            target = self.folder / path.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                shutil.copy(path, target)

    def run(self, command: str) -> None:
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"} | self.values
        inside = f"cd {shlex.quote(self.directory)} && {command}"
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", ENTER, self.folder, inside]
        subprocess.run(unshare, env=environment, check=True)

    def copy(self, place: str) -> None:
        if place != ". .":
            raise SystemExit(f"only COPY . . can be carried out here, and not {place!r}")
        target = self.folder / self.directory.lstrip("/")
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", target], input=archive, check=True)

    def carry_out(self, name: str, rest: str) -> None:
        if name == "RUN":
            self.run(rest)
        elif name == "COPY":
            self.copy(rest)
        elif name == "WORKDIR":
            self.directory = rest
            (self.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name in ("ENV", "ARG"):
            key, _, value = rest.partition("=")
            self.values[key] = self.given.get(key, value.strip('"')) if name == "ARG" else value.strip('"')
        elif name != "CMD":
            raise SystemExit(f"{name} cannot be carried out here")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="the stage to end with (the last)")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bring", action="append", default=[], metavar="PATH")
    parser.add_argument("--variable", action="append", default=[], metavar="NAME")
    parser.add_argument("--folder", type=Path, help="where to make it, and leave it (a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        image = Image((arguments.folder or Path(temporary) / "debian").absolute(), arguments)
        stages: list[str] = []
        for name, rest in instructions((ROOT / "Dockerfile").read_text()):
            if name == "FROM":
                if stages and stages[-1] == arguments.target:
                    break
                base, _, stage = rest.partition(" AS ")
                if not stages:
                    image.debian(base)
                elif base != stages[-1]:
                    raise SystemExit(f"only stages on top of each other can be made here, and not {base!r}")
                stages.append(stage)
                continue
            print(f"{name} {rest}", flush=True)
            began = time.monotonic()
            image.carry_out(name, rest)
            if name == "RUN":
                print(f"-> {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
