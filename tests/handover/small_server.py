"""A server of completions that imports nothing large and gives the same answer to everything.

As a program, with the words of llama-server: `small_server.py -m FILE --host HOST --port PORT`.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "two"}]})


if __name__ == "__main__":
    words = sys.argv[1:]
    address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
    server = HTTPServer(address, Handler)
    sys.stdout.write(f"serves {words[words.index('-m') + 1]}\n")
    sys.stdout.flush()
    server.serve_forever()
