"""Starts the tool that a result is for, and asks it five prompts: vLLM, SGLang and llama.cpp's server by the protocol
of completions that they share, node-llama-cpp by a script, Ollama by its own API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.errors import EnvironmentProblem
from engine.extras.handover.answers import NEW_TOKENS, Prompt
from engine.extras.handover.gguf import ending_with_us
from engine.extras.handover.result import INSTALL, PROGRAMS

START_SECONDS = 1_800.0
"""A server compiles and loads for minutes; one that ends is told at once."""
ANSWER_SECONDS = 600.0
POLL_SECONDS = 0.5
TAIL = 12
SHELL_SIGNAL = 128
"""A shell adds it to the number of the signal that ended a command."""
NODE_SCRIPT = Path(__file__).with_name("ask_llama_cpp.mjs")
OLLAMA_HOST = "http://127.0.0.1:11434"


def require_program(words: Sequence[str], consumer: str) -> None:
    """Raise EnvironmentProblem, with the line that installs it, if the program of a server is not there."""
    module = words[2] if words[1:2] == ["-m"] else None
    there = shutil.which(words[0]) is not None
    if there and module is not None:
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module.partition('.')[0]!r}) is None)"
        there = subprocess.run([words[0], "-c", probe], check=False).returncode == 0
    if not there:
        raise not_installed(consumer)


def not_installed(consumer: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"--check: {PROGRAMS[consumer]} is not installed; all files were written",
        fix=f"{INSTALL[consumer]}, add its programs to PATH, and check again",
    )


def ask_server(
    words: Sequence[str], model: str, prompts: Sequence[Prompt], log: Path, notify: Callable[[str], None]
) -> list[str]:
    """Start `words` on a free port, ask, and end it. Raises EnvironmentProblem with the end of its log if it fails."""
    port = _free_port()
    with _process([*words, "--host", "127.0.0.1", "--port", str(port)], log) as process:
        notify(f"waiting for {words[0]} (its log: {log})")
        address = f"http://127.0.0.1:{port}"
        _wait_for(address, process, log)
        body = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}
        answers = []
        for prompt in prompts:
            found = _post(f"{address}/v1/completions", {**body, "prompt": prompt.ids})
            answers.append(str(found["choices"][0]["text"]))
        return answers


def ask_llama_cpp(gguf: Path, prompts: Sequence[Prompt], log: Path, notify: Callable[[str], None]) -> list[str]:
    """By llama-server if it is on the path, else by node-llama-cpp. Raises EnvironmentProblem if neither is there."""
    if shutil.which("llama-server"):
        return ask_server(["llama-server", "-m", str(gguf)], gguf.stem, prompts, log, notify)
    node, package = shutil.which("node"), find_node_package()
    if node is None or package is None:
        raise not_installed("gguf")
    notify(f"asking node-llama-cpp in {package}")
    asked = {
        "package": str(package), "model": str(gguf), "tokens": NEW_TOKENS,
        "prompts": [{"ids": prompt.ids, "text": prompt.text} for prompt in prompts],
    }  # fmt: skip
    ended = subprocess.run(
        [node, str(NODE_SCRIPT)], input=json.dumps(asked), capture_output=True, text=True, check=False,
        timeout=START_SECONDS,
    )  # fmt: skip
    log.write_text(ended.stderr, "utf-8")
    if ended.returncode:
        raise _failed("llama.cpp", ended.returncode, log)
    found = json.loads(ended.stdout.splitlines()[-1])
    for prompt, tokens in zip(prompts, found["tokens"], strict=True):
        if tokens != prompt.ids:
            raise EnvironmentProblem(
                f"llama.cpp tokenises {prompt.text!r} differently: {tokens[:12]}, not {prompt.ids[:12]}",
                expected="the tokenizer of the model",
                fix="use a newer converter: this one does not support the pre-tokenizer",
            )
    return [str(text) for text in found["answers"]]


def find_node_package() -> Path | None:
    """node-llama-cpp in a node_modules of this folder or one above it, or in $NODE_PATH."""
    places = [folder / "node_modules" for folder in (Path.cwd(), *Path.cwd().parents)]
    places += [Path(part) for part in os.environ.get("NODE_PATH", "").split(os.pathsep) if part]
    return next((found for place in places if (found := place / "node-llama-cpp").is_dir()), None)


def ask_ollama(modelfile: Path, prompts: Sequence[Prompt], *, chat: bool) -> list[str]:
    """Create a model from the Modelfile, ask it, with `chat` by messages that Ollama renders, and remove it. Raises
    EnvironmentProblem: Ollama is not installed, does not run, or refuses the model."""
    program = shutil.which("ollama")
    if program is None:
        raise not_installed("ollama")
    name = f"tunedeck-check-{os.getpid()}"
    log = modelfile.with_name("ollama.log")
    with log.open("w") as output:
        made = subprocess.run(
            [program, "create", name, "-f", str(modelfile)], stdout=output, stderr=output, check=False
        )
    if made.returncode:
        raise _failed("ollama create", made.returncode, log)
    host = os.environ.get("OLLAMA_HOST") or OLLAMA_HOST
    host = (host if "://" in host else f"http://{host}").rstrip("/")
    body = {"model": name, "stream": False, "options": {"temperature": 0, "num_predict": NEW_TOKENS}}
    try:
        if chat:
            found = [_post(f"{host}/api/chat", {**body, "messages": prompt.messages}) for prompt in prompts]
            return [str(each["message"]["content"]) for each in found]
        found = [_post(f"{host}/api/generate", {**body, "raw": True, "prompt": prompt.text}) for prompt in prompts]
        return [str(each["response"]) for each in found]
    finally:
        subprocess.run([program, "rm", name], capture_output=True, check=False)


@contextmanager
def _process(words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process and those that it starts, ended with the block; itself also when this process is killed."""
    with log.open("wb") as output:
        process = subprocess.Popen(ending_with_us(words), stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, None)):
            try:
                os.killpg(process.pid, number)
                process.wait(seconds)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(POLL_SECONDS)
    raise _failed("the server", process.poll(), log)


def _post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", "replace")[:500]
        raise EnvironmentProblem(
            f"{address} returned an error: {error.code} {said}", fix="serve the merged model"
        ) from error
    except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError) as error:
        raise EnvironmentProblem(f"{address} does not respond: {error}", fix="start it, then repeat --check") from error
    return found


def _failed(what: str, code: int | None, log: Path) -> EnvironmentProblem:
    """`code`: the exit code, negative or above 128 after a signal; None: it still runs, and does not answer."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-TAIL:]
    end = f"; the end of {log}:\n  " + "\n  ".join(lines) if lines else f"; {log} is empty"
    fix = "see the log; the model may need --merged"
    number = -code if code is not None and code < 0 else (code or 0) - SHELL_SIGNAL
    if code is None:
        how = f"does not respond after {START_SECONDS:.0f} s"
    elif number in set(signal.Signals):
        how = f"was terminated by {signal.Signals(number).name}"
        if number == signal.SIGILL:
            fix = (
                "install a build for this processor: the installed one uses instructions that the processor does "
                "not have"
            )
    else:
        how = f"failed with exit code {code}"
    return EnvironmentProblem(f"{what} {how}{end}", fix=fix)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
