"""A hub for one machine that serves the files of data sets, as far as the libraries ask for them. Not a test module."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"
DATE = "2026-01-01T00:00:00.000Z"


@contextmanager
def serving(name: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serve the data set `name` inside the block; yields the address of the hub."""
    handler = type("Handler", (_Handler,), {"name": name, "files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    name: str
    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/":
            self.answer(200, b"")
        elif found := re.fullmatch(rf"/datasets/{self.name}/resolve/[^/]+/(.+)", path):
            self.file(found[1])
        elif re.fullmatch(rf"/api/datasets/{self.name}(/revision/[^/]+)?", path):
            siblings = [{"rfilename": file} for file in self.files]
            self.answer(200, {"id": self.name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []})
        elif found := re.fullmatch(rf"/api/datasets/{self.name}/tree/[^/]+/?(.*)", path):
            self.answer(200, self.tree(found[1], "recursive=true" in self.path.lower()))
        else:
            self.refuse(path)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if not re.fullmatch(rf"/api/datasets/{self.name}/paths-info/[^/]+", path):
            self.refuse(path)
            return
        asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
        known = {each["path"]: each for each in self.tree("", recursive=True)}
        self.answer(200, [known[each] for each in asked if each in known])

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """The files and folders below `folder`."""
        root = f"{folder}/" if folder else ""
        inside = {path: content for path, content in self.files.items() if path.startswith(root)}
        found = [_entry(path, content) for path, content in inside.items()
                 if recursive or "/" not in path.removeprefix(root)]  # fmt: skip
        folders = {root + part for path in inside for part in _folders(path.removeprefix(root))}
        return found + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0, "lastCommit": None}
                        for path in sorted(folders) if recursive or "/" not in path.removeprefix(root)]  # fmt: skip

    def file(self, path: str) -> None:
        if path not in self.files:
            self.refuse(path)
            return
        etag = f'"{hashlib.sha1(self.files[path]).hexdigest()}"'
        self.answer(200, self.files[path], {"ETag": etag, "X-Repo-Commit": COMMIT})

    def refuse(self, path: str) -> None:
        self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": f"no {path}"})

    def answer(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid, "lastCommit": None}


def _folders(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
