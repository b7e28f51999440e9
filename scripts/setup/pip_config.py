"""What pip is told about indexes, certificates, proxies and time limits, for uv, which reads none of it."""

from __future__ import annotations

import ast
import base64
import contextlib
import os
import re
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

PYPI = "https://pypi.org/simple"
#: sections of pip's configuration in the order in which one overrides another; `:env:` are variables, such as PIP_CERT
_SECTIONS = ("global", "install", ":env:")


@dataclass(frozen=True)
class PipConfig:
    """Where packages come from: `pip config`, and pip's defaults."""

    values: dict[str, str] = field(default_factory=dict)

    @property
    def indexes(self) -> list[str]:
        """The index, if there is one, and all extra ones."""
        if self._is_on("no-index"):
            return []
        return [url.rstrip("/") for url in (self.values.get("index-url", PYPI), *self._list("extra-index-url"))]

    @property
    def find_links(self) -> list[str]:
        """Folders and pages with files to install."""
        return self._list("find-links")

    @property
    def timeout(self) -> float:
        """Seconds that a connection may say nothing."""
        return float(self.values.get("timeout", self.values.get("default-timeout", 15)))

    def of_index(self, url: str) -> PipConfig:
        """The same ways, to one index alone."""
        return PipConfig(self.values | {"index-url": url, "extra-index-url": "", "find-links": "", "no-index": "no"})

    @property
    def uv_arguments(self) -> list[str]:
        """The same for `uv pip install`."""
        arguments = ["--no-index"] if self._is_on("no-index") else []
        if "index-url" in self.values:
            arguments += ["--default-index", self.values["index-url"]]
        for url in self._list("extra-index-url"):
            arguments += ["--index", url]
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self._list("trusted-host"):
            arguments += ["--allow-insecure-host", host]
        if "cert" in self.values:
            arguments += ["--cert", self.values["cert"]]
        # As pip does: from whichever index has the version. Hashes say that it is the right file.
        return [*arguments, "--index-strategy", "unsafe-best-match"]

    @property
    def environment(self) -> dict[str, str]:
        """What uv takes from variables alone."""
        found = {"UV_HTTP_TIMEOUT": str(round(self.timeout))}
        for name, variable in (("retries", "UV_HTTP_RETRIES"), ("client-cert", "SSL_CLIENT_CERT")):
            if name in self.values:
                found[variable] = self.values[name]
        if "proxy" in self.values:
            found |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), self.values["proxy"])
        return found

    def open(self, url: str, timeout: float) -> str:
        """The page at `url`, through the proxy and with the certificates that pip would use.

        Raises:
            OSError: it cannot be had; an answer with a status of 400 or more is a urllib.error.HTTPError.
        """
        request, proxy = _without_password(url), self.values.get("proxy")
        context = ssl.create_default_context(cafile=self.values.get("cert"))
        if any(host.split(":")[0] in url for host in self._list("trusted-host")):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None),
            urllib.request.HTTPSHandler(context=context),
        )
        with opener.open(request, timeout=timeout) as answer:
            text: str = answer.read().decode(errors="replace")
            return text

    def _list(self, name: str) -> list[str]:
        return self.values.get(name, "").split()

    def _is_on(self, name: str) -> bool:
        return self.values.get(name, "").lower() in ("1", "true", "yes", "on")


def bundled_pip() -> list[str]:
    """The wheels of pip that Python, or Debian, has to make a venv with."""
    folders = [Path("/usr/share/python-wheels")]
    with contextlib.suppress(ImportError):
        import ensurepip

        folders.insert(0, Path(ensurepip.__file__).with_name("_bundled"))
    return [str(wheel) for folder in folders for wheel in folder.glob("pip-*.whl")][:1]


def read_pip_config() -> PipConfig:
    """The configuration that pip itself prints, or none where this Python has no pip."""
    values: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in _pip_config_list().splitlines():
        if (found := re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(.*)", line)) and found[2]:
            values[found[1]][found[2].replace("_", "-")] = str(ast.literal_eval(found[3]))
    return PipConfig({name: value for section in _SECTIONS for name, value in values[section].items()})


def _pip_config_list() -> str:
    """What `pip config list` prints; by the pip that a new venv would get, where this Python has none of its own."""
    found = [os.environ.get("PYTHONPATH", ""), *bundled_pip()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, found))}
    command = [sys.executable, "-W", "ignore", "-m", "pip", "--disable-pip-version-check", "config", "list"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def _without_password(url: str) -> urllib.request.Request:
    """A request whose name and password stand in its header, where they belong, and not in the URL."""
    parts = urllib.parse.urlsplit(url)
    if not parts.username:
        return urllib.request.Request(url)
    name, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
    token = base64.b64encode(f"{name}:{password}".encode()).decode()
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urllib.request.Request(bare.geturl(), headers={"Authorization": f"Basic {token}"})
