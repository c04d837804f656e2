"""A real HTTP server on 127.0.0.1 that plays a list of responses and records what it was sent.

with Server([reply("Final Answer: 4")]) as server:
    ... use server.url as the base URL ...
    server.requests[0].json["messages"]
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SSE = "text/event-stream; charset=utf-8"
NOW = {"retry-after-ms": "1"}  # tells the SDK to retry at once, which keeps tests quick


@dataclass
class Response:
    """What the server does with one request: pieces of a body, then perhaps a pause, an end."""

    pieces: list[bytes] = field(default_factory=list)
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    wait: float = 0.0  # seconds before the status line; ends early when the server closes
    pause: float = 0.0  # seconds after each piece; ends early when the server closes
    broken: bool = False  # the connection closes before the body is complete


@dataclass
class Request:
    """One request as it came in."""

    path: str
    headers: dict[str, str]  # names in lower case
    raw: bytes
    json: Any


def event(data: Any) -> bytes:
    """One server-sent event; a string goes out as it is, anything else as JSON."""
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


def sse(*chunks: Any, done: bool = True, **more: Any) -> Response:
    """A stream of these chunks (dicts, or strings for raw data)."""
    ending = [event("[DONE]")] if done else []
    return Response([*map(event, chunks), *ending], kind=SSE, **more)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk with one choice."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def reply(
    text: str,
    reasoning: str = "",
    finish: str | None = "stop",
    usage: dict[str, Any] | None = None,
    size: int = 7,
    **more: Any,
) -> Response:
    """A good streamed reply, in pieces of `size` characters."""
    chunks = [delta(reasoning_content=piece) for piece in _cut(reasoning, size)]
    chunks += [delta(content=piece) for piece in _cut(text, size)]
    if finish is not None:
        chunks.append(delta(finish))
    if usage is not None:
        chunks.append({"choices": [], "usage": usage})
    return sse(*chunks, **more)


def plain(content: Any, finish: str | None = "stop", **more: Any) -> Response:
    """A good reply in one piece, though a stream was asked for."""
    message = {"role": "assistant", "content": content}
    return body({"choices": [{"message": message, "finish_reason": finish}], **more})


def body(data: Any, status: int = 200, kind: str = "application/json", **headers: str) -> Response:
    """Any body: a string or bytes as they are, anything else as JSON."""
    text = data if isinstance(data, (str, bytes)) else json.dumps(data)
    raw = text.encode() if isinstance(text, str) else text
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response([raw], status, kind, named)


def html(text: str, status: int = 200) -> Response:
    """A web page, as proxies and wrong addresses give it."""
    return body(f"<html><body>{text}</body></html>", status, "text/html")


def error(status: int, message: str = "no", code: Any = None, **headers: str) -> Response:
    """OpenAI's error object. Retried at once unless headers say otherwise."""
    response = body({"error": {"message": message, "type": "x", "code": code}}, status, **headers)
    response.headers = {**NOW, **response.headers}
    return response


def refused(name: str) -> Response:
    """The 400 of a server that doesn't know an option."""
    return error(400, f"Unsupported parameter: '{name}' is not supported with this model.")


def cut(text: str) -> Response:
    """A stream whose connection breaks after this text."""
    return sse(delta(content=text), done=False, broken=True)


def hang(seconds: float) -> Response:
    """No status line for so long; then an empty stream."""
    return sse(wait=seconds)


class Server:
    """Plays its responses in order; the last one again and again with repeat=True."""

    def __init__(self, responses: list[Response], repeat: bool = False) -> None:
        self.responses = list(responses)
        self.repeat = repeat
        self.requests: list[Request] = []
        self.hung_up = threading.Event()  # a client closed the connection in mid-stream
        self.closing = threading.Event()
        self.lock = threading.Lock()

    def __enter__(self) -> Server:
        handler = type("Bound", (_Handler,), {"owner": self})
        self.http = _Quiet(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        serve = {"poll_interval": 0.02}
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs=serve, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def next_response(self, request: Request) -> Response:
        """Record the request, choose what it gets."""
        with self.lock:
            self.requests.append(request)
            if not self.responses:
                return error(400, "the test's server has no response left")
            last = self.repeat and len(self.responses) == 1
            return self.responses[0] if last else self.responses.pop(0)


class _Quiet(ThreadingHTTPServer):
    """Says nothing of clients that hang up: it would be on the stderr that a test looks at."""

    def handle_error(self, *_: object) -> None:
        """The standard one prints a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Server

    def log_message(self, *_: object) -> None:
        """Keep the tests' output clean."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            data = json.loads(raw)
        except ValueError:
            data = None
        response = self.owner.next_response(Request(self.path, headers, raw, data))
        try:
            self.play(response)
        except OSError:
            self.owner.hung_up.set()
            self.close_connection = True

    def play(self, response: Response) -> None:
        """Send it, in HTTP's chunked form so that a broken body can be told from a whole one."""
        self.owner.closing.wait(response.wait)
        self.send_response(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("content-type", response.kind)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in filter(None, response.pieces):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            self.owner.closing.wait(response.pause)
        if response.broken:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
