"""moto's S3 server over real HTTP, and a proxy in front of it that makes it slow, cut off, throttled, silent or late."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
_SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message><RequestId>0</RequestId></Error>"""
_LISTED = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


@dataclass
class Faults:
    """What the proxy does to requests; each Nth counts all of them."""

    #: seconds that each answer takes longer
    delay: float = 0.0
    #: each Nth connection is reset before the server has the request; 0: none
    cut_before: int = 0
    #: each Nth connection is reset when the server has done what was asked, and nobody is told
    cut_after: int = 0
    #: of each Nth answer half of the body comes
    cut_within: int = 0
    #: each Nth request is told to slow down
    throttled: int = 0
    #: seconds until what is written or removed shows in listings
    late: float = 0.0
    #: nothing is answered, and connections stay open
    silent: bool = False
    #: connections are reset, all of them
    gone: bool = False


@dataclass
class Proxy:
    """The proxy; `faults` may be changed at any time."""

    target: tuple[str, int]
    faults: Faults = field(default_factory=Faults)
    #: requests so far, and those that a fault has hit
    requests: int = 0
    hit: int = 0
    #: by path: when it was written
    written: dict[str, float] = field(default_factory=dict)
    #: set in the end, for connections that are silent
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_due(self, every: int, number: int) -> bool:
        """Whether a fault hits the request of a number."""
        if not every or number % every:
            return False
        self.hit += 1
        return True

    def number(self) -> int:
        """Of the next request."""
        with self.lock:
            self.requests += 1
            return self.requests


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # so that an answer is one packet: a second one waits 40 ms for the first to be confirmed

        def handle_request(self) -> None:
            body = self._body()
            faults, number = proxy.faults, proxy.number()
            if faults.silent:
                proxy.hit += 1
                proxy.over.wait()
            if faults.gone or faults.silent or proxy.is_due(faults.cut_before, number):
                return self._reset()
            time.sleep(faults.delay)
            if proxy.is_due(faults.throttled, number):
                return self._answer(503, "Slow Down", {"Content-Type": "application/xml"}, _SLOW_DOWN)
            status, reason, headers, content = self._forwarded(body)
            if proxy.is_due(faults.cut_after, number):
                return self._reset()
            self._answer(status, reason, headers, content, proxy.is_due(faults.cut_within, number))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

        def _body(self) -> bytes:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
                self.wfile.flush()
            if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _forwarded(self, body: bytes) -> tuple[int, str, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(*proxy.target, timeout=60)
            headers = {
                k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect", "connection")
            }
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if self.command == "PUT":
                proxy.written[self.path.partition("?")[0]] = time.monotonic()
            if self.command == "GET" and "list-type" in self.path:
                content = _LISTED.sub(self._listed, content)
            dropped = ("transfer-encoding", "content-length", "connection", "server", "date")
            return (
                answer.status,
                answer.reason,
                {k: v for k, v in answer.getheaders() if k.lower() not in dropped}
                | ({"Content-Length": answer.getheader("Content-Length", "0")} if self.command == "HEAD" else {}),
                content,
            )

        def _listed(self, found: re.Match[bytes]) -> bytes:
            """An entry of a listing, if it is not too new to show."""
            (key,) = _KEY.findall(found[0])
            written = proxy.written.get(f"/{BUCKET}/{key.decode()}", 0.0)
            if proxy.faults.late and time.monotonic() - written < proxy.faults.late:
                proxy.hit += 1
                return b""
            return found[0]

        def _answer(self, status: int, reason: str, headers: dict[str, str], content: bytes, half: bool = False) -> None:
            self.send_response(status, reason)
            for name, value in headers.items():
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if half else content)
            if half and len(content) > 1 and self.command != "HEAD":
                self.wfile.flush()
                self._reset()

        def _reset(self) -> None:
            """End the connection with a reset, as a host does that has no more to do with it."""
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        def log_message(self, *arguments: Any) -> None:
            """Nothing."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: Any) -> None:
        """Connections end in odd ways here."""


#: for a process that has no account: moto takes any key
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3() -> Iterator[Proxy]:
    """A server, with `BUCKET` in it, and the proxy, whose address is in the environment meanwhile."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port())
    front = _Server(("127.0.0.1", 0), _handler(proxy))
    threading.Thread(target=front.serve_forever, daemon=True).start()
    before = dict(os.environ)
    os.environ |= {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{front.server_address[1]}"}
    try:
        _make_bucket(proxy.target)
        yield proxy
    finally:
        proxy.over.set()
        front.shutdown()
        server.stop()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ |= before


def _make_bucket(target: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*target)
    connection.request(
        "PUT", f"/{BUCKET}", b"", {"Authorization": "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4"}
    )
    assert connection.getresponse().status == 200
    connection.close()


_numbers = itertools.count()


def new_address() -> str:
    """Of a run that nobody has written yet."""
    return f"s3://{BUCKET}/runs/{next(_numbers)}"
