"""A hub for one machine: speaks the protocol as far as huggingface_hub's client uses it to create, look at and fill a
repository of a model. Not a test module."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results

TOKEN = "hf_" + "aTokenThatOnlyThisServerKnows" * 2


class Repository:
    def __init__(self, private: bool = True, files: dict[str, bytes] | None = None, card: Any = None) -> None:
        self.private = private
        self.files = dict(files or {})
        self.commits: list[str] = ["0" * 40]
        self.card = card

    def write(self, folder: Path) -> Path:
        """The files in a folder, as a download would lay them."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


class Hub:
    """What the server has, and what was asked of it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        """Contents of large files by SHA-256, committed or not."""
        self.uploads: list[str] = []
        """SHA-256 of each large file whose upload began."""
        self.before_upload: Callable[[bytes], int] = lambda content: 200
        """Gets the content of a large file, and returns the status to answer with."""
        self.on_request: Callable[[str], None] = lambda request: None
        """Gets "METHOD /path" of each request before it is answered."""
        self.url = ""
        self.fault: Fault | None = None
        self.requests = 0
        self.strangers: list[str] = []
        """Tokens that came with requests to another name of this machine, to which a redirect led."""

    def mode(self, path: str) -> str:
        return "lfs" if path.endswith((".safetensors", "tokenizer.json")) else "regular"


FAULTS = ("dropped", "hangs", "redirected", "half an answer", "garbage", "error 500", "answer lost")


@dataclass
class Fault:
    """What the server does in place of an answer, from a request on; with "answer lost" after what it was asked for."""

    kind: str
    """Of FAULTS, or empty: `call` alone."""
    number: int
    """Of the first such request since the fault was set, counted from 1."""
    call: Callable[[], None] = lambda: None
    """What is done when the request arrives."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set at the end, for requests that hang."""


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def metadata_of(card: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "README.md")
        file.write_text(card)
        return metadata_load(file) or {}


def problems_of_card(text: str) -> list[str]:
    """What the hub refuses in a card's metadata."""
    metadata = metadata_of(text)
    problems = [
        f"{key} must be a name of the hub"
        for key in ("base_model", "datasets")
        for name in ([metadata[key]] if isinstance(metadata.get(key), str) else metadata.get(key, []))
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
    ]
    for key in ("license", "library_name", "pipeline_tag"):
        if key in metadata and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", str(metadata[key])):
            problems.append(f"{key} must be an identifier")
    if "model-index" in metadata:
        model_index_to_eval_results(metadata["model-index"])
    return problems


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a client's broken connection nowhere, and anything else as ever."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    lost = False
    """Whether no answer is sent."""
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, document: Any = None, headers: dict[str, str] | None = None) -> None:
        if self.lost:
            self.close_connection = True
            return
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, text: str) -> None:
        self.answer(status, {"error": text}, {"X-Error-Code": code, "X-Error-Message": text})

    def body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(size)
        if len(content) < size:
            raise ConnectionResetError("the client is gone")
        return content

    def known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.refuse(401, "", "Invalid username or password.")
        return False

    def parse_request(self) -> bool:
        """Return whether the request is to be answered."""
        return super().parse_request() and not self.failed()

    def failed(self) -> bool:
        hub, fault = self.hub, self.hub.fault
        token = self.headers.get("Authorization")
        if str(self.headers.get("Host")).startswith("localhost") and token:
            hub.strangers.append(token)
        hub.requests += 1
        if fault is None or hub.requests < fault.number:
            return False
        if hub.requests == fault.number:
            fault.call()
        self.lost = fault.kind == "answer lost"
        if self.lost or not fault.kind:
            return False
        self.close_connection = True
        if fault.kind == "hangs":
            fault.over.wait()
        elif fault.kind == "redirected":
            other = self.hub.url.replace("127.0.0.1", "localhost")
            self.wfile.write(b"HTTP/1.1 307 Moved\r\nContent-Length: 0\r\nConnection: close\r\n"
                             + f"Location: {other}{self.path}\r\n\r\n".encode())  # fmt: skip
        elif fault.kind == "half an answer":
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"name": "me"')
        elif fault.kind == "error 500":
            self.wfile.write(b"HTTP/1.1 500 Broken\r\nContent-Length: 5\r\nConnection: close\r\n\r\nsorry")
        elif fault.kind == "garbage":
            self.wfile.write(b"\x00\xff\xfe no answer \x1b[31m\r\n\r\n")
        return True

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.on_request(f"{self.command} {path}")
        if not self.known():
            return
        if path == "/api/whoami-v2":
            self.answer(200, {"name": "me", "type": "user", "orgs": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            self.model(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self.file(found[1], found[2])
        else:
            self.refuse(404, "EntryNotFound", f"no {path}")

    do_HEAD = do_GET

    def model(self, name: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.refuse(404, "RepoNotFound", "Repository not found")
            return
        files = [{"rfilename": file} for file in repository.files]
        told = {"id": name, "private": repository.private, "sha": repository.commits[-1], "siblings": files}
        self.answer(200, {**told, "tags": [], "cardData": repository.card})

    def file(self, name: str, path: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None or path not in repository.files:
            self.refuse(404, "RepoNotFound" if repository is None else "EntryNotFound", f"no {name}/{path}")
            return
        content = repository.files[path]
        self.answer(200, content, {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": repository.commits[-1]})

    def do_POST(self) -> None:
        path, content = urlsplit(self.path).path, self.body()
        self.hub.on_request(f"{self.command} {path}")
        if not self.known():
            return
        if path == "/api/repos/create":
            self.create(json.loads(content))
        elif path == "/api/validate-yaml":
            problems = problems_of_card(json.loads(content)["content"])
            self.answer(400 if problems else 200, {"errors": [{"message": it} for it in problems], "warnings": []})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            self.preupload(found[1], json.loads(content))
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [self.action(each) for each in json.loads(content)["objects"]]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self.commit(found[1], [json.loads(line) for line in content.splitlines()])
        else:
            self.refuse(404, "EntryNotFound", f"no {path}")

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        told = {"url": f"{self.hub.url}/{name}", "id": name}
        if name in self.hub.repositories:
            self.answer(409, {**told, "error": "You already created this model repo"})
            return
        self.hub.repositories[name] = Repository(asked.get("visibility") == "private" or asked.get("private") is True)
        self.answer(200, told)

    def preupload(self, name: str, asked: dict[str, Any]) -> None:
        there = self.hub.repositories[name].files
        files = []
        for each in asked["files"]:
            path, mode = each["path"], self.hub.mode(each["path"])
            content = there.get(path)
            oid = None if content is None else hashlib.sha256(content).hexdigest() if mode == "lfs" else _blob(content)
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def action(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.hub.large:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.hub.url}/large/{asked['oid']}"}}}

    def do_PUT(self) -> None:
        content, oid = self.body(), self.path.rpartition("/")[2]
        self.hub.on_request(f"{self.command} {self.path}")
        self.hub.uploads.append(oid)
        assert hashlib.sha256(content).hexdigest() == oid
        status = self.hub.before_upload(content)
        if status == 200:
            self.hub.large[oid] = content
        self.answer(status, {})

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[name]
        for line in lines:
            told = line["value"]
            if line["key"] == "file":
                repository.files[told["path"]] = base64.b64decode(told["content"])
            elif line["key"] == "lfsFile":
                repository.files[told["path"]] = self.hub.large[told["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[told["path"]]
        repository.commits.append(f"{len(repository.commits):040x}")
        self.answer(
            200,
            {
                "commitUrl": f"{self.hub.url}/{name}/commit/{repository.commits[-1]}",
                "commitOid": repository.commits[-1],
            },
        )
