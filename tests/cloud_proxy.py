"""A web server between a test and an object store that is slow, breaks off, and says that it is busy."""

import http.client
import itertools
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PASSED_ON = ("content-type", "content-range", "etag", "last-modified", "accept-ranges")


class Proxy:
    """Passes requests on to a port of this machine. `latency` is in seconds; `faults` come in turn, one for every
    `every` requests: reset, truncated, silent, 503, 403, none; `asked` counts requests, `made` has the faults,
    `ranges` what was asked for, and `most_at_once` is how many requests waited together."""

    def __init__(self, port: int) -> None:
        self.upstream, self.latency, self.faults, self.every = port, 0.0, (), 1
        self.asked, self.made = 0, []
        self.ranges, self.most_at_once, self._waiting = [], 0, 0
        self._lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def calm(self) -> None:
        """No more faults, and counts begin again."""
        self.latency, self.faults, self.every, self.asked, self.made, self.ranges, self.most_at_once = (
            0.0,
            (),
            1,
            0,
            [],
            [],
            0,
        )

    def disturb(self, *faults: str, every: int = 1, latency: float = 0.0) -> None:
        """Faults, in turn."""
        self.calm()
        self.faults, self.every, self.latency = faults, every, latency
        self._turns = itertools.cycle(faults)

    def answering(self, more: int) -> None:
        """Count the requests that wait for an answer."""
        with self._lock:
            self._waiting += more
            self.most_at_once = max(self.most_at_once, self._waiting)

    def next_fault(self, wanted: str | None) -> str | None:
        """What goes wrong with this request."""
        with self._lock:
            self.asked += 1
            self.ranges.append(wanted)
            if not self.faults or self.asked % self.every:
                return None
            self.made.append(next(self._turns))
            return self.made[-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.proxy.next_fault(self.headers.get("Range"))
        self.proxy.answering(1)
        time.sleep(self.proxy.latency)
        self.proxy.answering(-1)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if fault == "silent":
            time.sleep(2)
            self.close_connection = True
            return
        if fault in ("503", "403"):
            self._send(int(fault), {}, b"")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream)
        upstream.request("GET", self.path, headers=dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        headers = {name: value for name, value in answer.getheaders() if name.lower() in PASSED_ON}
        upstream.close()
        self._send(answer.status, headers, content, len(content) // 2 if fault == "truncated" else None)

    def _send(self, status: int, headers: dict, content: bytes, part: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:part])
        self.close_connection = part is not None
