"""Tests that the config of an unknown model is fetched from the hub, which a small local server replaces."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.budget.metered_step import QWEN2

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VALUES = 1000 * 128 + 4 * (3 * 128 * 384 + 2 * 128 * 128 + 2 * 128 * 64 + 256 + 2 * 128) + 128
"""Number of parameters of QWEN2, computed by hand."""


def safetensors_header(dtype: str, values: int) -> bytes:
    """The header of a safetensors file with one tensor."""
    header = json.dumps({"all": {"dtype": dtype, "shape": [values], "data_offsets": [0, 2 * values]}}).encode()
    return struct.pack("<Q", len(header)) + header


@contextmanager
def hub(files: dict[str, bytes], status: int = 404, error: str = "EntryNotFound") -> Iterator[str]:
    """Run a server that answers requests for files of owner/model as the hub does, and every other request with
    `status` and the error code `error`. Yields the server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, *, body: bool) -> None:
            prefix, _, name = self.path.partition("/resolve/main/")
            content = files.get(name) if prefix == "/owner/model" else None
            if self.path == "/":
                content = b""
            self.send_response(status if content is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{len(content or b"")}-{name}"')
            if content is None:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if body and content:
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def log_message(self, format: str, *arguments: object) -> None:
            """Suppress the log line of each request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


Ended = subprocess.CompletedProcess[str]


def plan(place: Path, endpoint: str, model: str = "owner/model", **environment: str) -> Ended:
    """Run `tunedeck plan` with its own hub cache, a folder under `place`."""
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "tunedeck.py"), "plan", "-p", "24gb", "-r", "lora", "--json",
         "--set", f"model.id={model}", "--set", "data.sources.main.path=builtin:dates"],
        env={**os.environ, "HF_HOME": str(place), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


CONFIG = json.dumps(QWEN2).encode()


def test_the_config_is_fetched_once_and_then_found_in_the_cache(tmp_path: Path) -> None:
    files = {"config.json": CONFIG, "model.safetensors": safetensors_header("BF16", VALUES)}
    with hub(files) as endpoint:
        first = plan(tmp_path, endpoint)
    assert (first.returncode, first.stderr) == (0, "")
    again = plan(tmp_path, endpoint)  # nobody answers there any more
    assert again.returncode == 0
    assert json.loads(again.stdout)["components"] == json.loads(first.stdout)["components"]


def test_weight_files_that_hold_something_else_are_told_of(tmp_path: Path) -> None:
    with hub({"config.json": CONFIG, "model.safetensors": safetensors_header("U8", VALUES // 2)}) as endpoint:
        told = plan(tmp_path, endpoint)
    assert told.returncode == 0
    assert f"{VALUES // 2:,} parameters" in told.stderr and f"{VALUES:,}" in told.stderr


def test_of_an_unknown_family_the_size_of_the_weights_is_told(tmp_path: Path) -> None:
    files = {"config.json": b'{"model_type": "novel"}', "model.safetensors": safetensors_header("BF16", 2**30)}
    with hub(files) as endpoint:
        told = plan(tmp_path, endpoint)
    assert told.returncode == 2
    assert "2.00 GiB as stored" in told.stderr and "novel" in told.stderr


def test_weights_in_no_safetensors_are_refused(tmp_path: Path) -> None:
    with hub({"config.json": CONFIG}) as endpoint:
        refused = plan(tmp_path, endpoint)
    assert refused.returncode == 2
    assert "no safetensors files" in refused.stderr and "safetensors version of the model" in refused.stderr


def test_a_quantised_model_of_the_hub_is_refused_once_its_config_is_here(tmp_path: Path) -> None:
    stored = json.dumps({**json.loads(CONFIG), "quantization_config": {"quant_method": "awq"}}).encode()
    weights = safetensors_header("BF16", VALUES)
    with hub({"config.json": stored, "model.safetensors": weights}) as endpoint:
        refused = plan(tmp_path, endpoint)
    assert refused.returncode == 2
    assert "are stored quantised (awq)" in refused.stderr and "unquantised repository" in refused.stderr


@pytest.mark.parametrize(
    ("error", "status", "code", "word"),
    [
        ("RepoNotFound", 401, 6, "check the spelling"),
        ("GatedRepo", 403, 6, "accept them at"),
        ("EntryNotFound", 404, 2, "has no config.json"),
        ("RevisionNotFound", 404, 2, "model.revision"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_fix(
    tmp_path: Path, error: str, status: int, code: int, word: str
) -> None:
    with hub({}, status, error) as endpoint:
        refused = plan(tmp_path, endpoint)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert word in refused.stderr and "Traceback" not in refused.stderr


def test_without_a_network_the_fix_is_to_bring_the_config(tmp_path: Path) -> None:
    for environment in ({}, {"HF_HUB_OFFLINE": "1"}):
        refused = plan(tmp_path, "http://127.0.0.1:9", **environment)
        assert (refused.returncode, refused.stdout) == (6, "")
        assert "hf download owner/model config.json" in refused.stderr


def test_a_name_that_no_model_can_have_is_refused(tmp_path: Path) -> None:
    with hub({}) as endpoint:
        refused = plan(tmp_path, endpoint, model="a b/c d/e")
    assert refused.returncode == 2
    assert "OWNER/NAME" in refused.stderr
