"""`tunedeck doctor`: reports what this machine offers a run, what is missing, and what to do about it.

Every check returns findings and never raises: a machine in a bad state is what this command is for.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import Request, urlopen

import typer

from engine.commands.shared import (
    JsonOption,
    OptionalProfile,
    OptionalRecipe,
    RunsOption,
    print_json,
    print_line,
    runs_folder,
)
from engine.errors import EnvironmentProblem, UsageError

HUB_TIMEOUT_SECONDS = 2.5
LOW_DISK_BYTES = 20 * 2**30
CONSOLE_PACKAGES = ("textual", "pydantic")
OPTIONAL = {
    "liger-kernel": "fused kernels on CUDA, about 1.2 times as fast",
    "bitsandbytes": "adamw_8bit and nf4",
    "flash-linear-attention": "linear attention on CUDA, about twice as fast",
}
State = Literal["ok", "missing", "problem", "note"]
_GLYPHS: dict[State, str] = {"ok": "+", "missing": "-", "problem": "!", "note": "."}


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the report: topic, state, text, and the fix of a problem."""

    topic: str
    state: State
    text: str
    fix: str = ""


def doctor(
    as_json: JsonOption = False,
    runs: RunsOption = None,
    hub: Annotated[bool, typer.Option(help="Check whether the Hugging Face hub is reachable.")] = True,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="Check the fast paths of a run on each GPU, or on the devices of -p.")
    ] = False,
    profile: OptionalProfile = None,
    recipe: OptionalRecipe = None,
) -> None:
    """Check GPUs, driver, versions, hub access, tmux and disk. Shows what holds GPU memory, and what is missing.

    With --gpus, compare every fast path of a run (attention, loss, adapters, optimizer, out-of-memory, copies) with a
    plain reference, for the recipe -r or for small LoRA and full runs; with several devices, also check
    communication between their ranks. Exits 6 if a check fails, or if there is no GPU.
    """
    if not gpus and (profile or recipe):
        raise UsageError("-p and -r select what --gpus checks", fix="add --gpus")
    findings = _proofs(profile, recipe) if gpus else examine(runs_folder(runs), ask_hub=hub)
    _print(findings, as_json=as_json)
    if gpus and any(finding.state == "problem" for finding in findings):
        raise typer.Exit(EnvironmentProblem.exit_code)


def _proofs(profile: str | None, recipe: str | None) -> list[Finding]:
    """A finding for each proof (a comparison of a fast computation with its reference) on each device."""
    from engine.commands.doctor_gpus import prove_gpus

    return [_of_proof(where, event) for where, event in prove_gpus(profile, recipe)]


def _of_proof(where: str, event: dict[str, Any]) -> Finding:
    if "error" in event:
        return Finding(where, "problem", f"could not be checked: {event['error']}")
    states: dict[bool | None, State] = {True: "ok", None: "note", False: "problem"}
    instead = f"fallback of a run: {event['fallback']}" if event["fallback"] else ""
    return Finding(where, states[event["passed"]], f"{event['name']}: {event['detail']}", instead)


def _print(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
        return
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        print_line(f"{_GLYPHS[finding.state]} {finding.topic:<{width}}  {finding.state:<7}  {finding.text}")
        if finding.fix:
            print_line(f"  {'':<{width}}  {'':<7}  fix: {finding.fix}")


def examine(runs: Path, *, ask_hub: bool = True) -> list[Finding]:
    """Run all checks. `runs` is the folder of runs, whose disk is checked; `ask_hub`: send the hub a request."""
    from engine.checks.machine import missing_packages  # imported here: it loads pydantic

    findings = [_own_version(), _python(), *_versions(), *([] if "torch" in missing_packages() else _torch()), *_gpus()]
    findings += [_hub_token(), *([_hub_access()] if ask_hub else []), _tmux(), _disk(runs)]
    return findings


def _own_version() -> Finding:
    return Finding("tunedeck", "ok", _version("tunedeck") or "not installed: running from the source folder")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", "ok", version)


def _versions() -> list[Finding]:
    from engine.checks.machine import TRAINING_PACKAGES
    from engine.config.files.machine import install_command

    findings = []
    for package in (*TRAINING_PACKAGES, *CONSOLE_PACKAGES):
        version = _version(package)
        if version:
            findings.append(Finding(package, "ok", version))
        else:
            fix = install_command("train" if package in TRAINING_PACKAGES else "", [package])
            findings.append(Finding(package, "missing", "not installed", fix))
    for package, purpose in OPTIONAL.items():
        version = _version(package)
        text = version or f"not installed; needed for: {purpose}"
        findings.append(Finding(package, "ok" if version else "note", text))
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a CUDA library that is missing or does not match
        return [Finding("torch", "problem", f"cannot be imported: {error}", "reinstall torch for this machine")]
    if torch.version.cuda is None:
        text = "built without CUDA: only profiles of kind cpu and metered (-p demo) run here"
        return [Finding("cuda", "note", text, "for NVIDIA GPUs: https://pytorch.org/get-started")]
    if not torch.cuda.is_available():
        fix = "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return [Finding("cuda", "problem", f"torch was built for CUDA {torch.version.cuda} but finds no device", fix)]
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return [Finding("cuda", "ok", f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} visible to torch: {names}")]


def _gpus() -> list[Finding]:
    from engine.config.files.machine import install_packages

    try:
        from engine.device.nvml import driver_version, read_gpus
    except ImportError as error:
        return [Finding("gpu", "missing", f"the driver does not respond: {error}", install_packages("nvidia-ml-py"))]
    driver = driver_version()
    if driver is None:
        return [Finding("driver", "note", "no NVIDIA driver found; -p demo runs without one")]
    return [Finding("driver", "ok", driver), *(_gpu(reading) for reading in read_gpus())]


def _gpu(reading: Any) -> Finding:
    used, total = reading.used_bytes / 2**30, reading.total_bytes / 2**30
    text = f"{reading.name}, {total:.1f} GiB, {used:.1f} GiB in use"
    if not reading.processes:
        return Finding(f"gpu {reading.index}", "ok", text)
    holders = ", ".join(f"pid {process.pid} ({process.name})" for process in reading.processes)
    return Finding(f"gpu {reading.index}", "note", f"{text}, held by {holders}")


def _hub_token() -> Finding:
    if any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")):
        return Finding("hub token", "ok", "set in the environment")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    token = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    if token.is_file():
        return Finding("hub token", "ok", f"found in {token}")
    return Finding("hub token", "note", "not set; gated and private models need one", "hf auth login")


def _hub_access() -> Finding:
    """Within a time limit: a firewall may drop packets."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding("hub", "note", "HF_HUB_OFFLINE is set: only cached models and data are used")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    problem = within(HUB_TIMEOUT_SECONDS, lambda: _ask(endpoint))
    if problem is None:
        return Finding("hub", "ok", f"{endpoint} is reachable")
    fix = "use local folders for models and data, or check the network and HTTPS_PROXY; cached models work offline"
    return Finding("hub", "problem", f"{endpoint} is not reachable: {problem}", fix)


def _ask(endpoint: str) -> str | None:
    """None for any HTTP answer, else why there was none."""
    try:
        if urlparse(endpoint).scheme not in ("http", "https"):
            return "HF_ENDPOINT is not an HTTP address"
        with urlopen(Request(endpoint, method="HEAD"), timeout=HUB_TIMEOUT_SECONDS):
            return None
    except HTTPError:
        return None  # an error page is an answer
    except (HTTPException, URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def within(seconds: float, question: Callable[[], str | None]) -> str | None:
    """The answer of a thread, or "no answer" after `seconds`: a host name lookup has no time limit."""
    import threading

    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(question()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:g} s"


def _tmux() -> Finding:
    if os.environ.get("TMUX"):
        return Finding("tmux", "ok", "this terminal runs inside tmux")
    if shutil.which("tmux"):
        return Finding("tmux", "ok", "installed")
    return Finding("tmux", "note", "not installed; a closed terminal ends the console but not the runs")


def _disk(runs: Path) -> Finding:
    place = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    text = f"{free_bytes / 2**30:.1f} GiB free for {runs}"
    if not os.access(place, os.W_OK):
        return Finding("disk", "problem", f"{place} is not writable", "choose another folder with --runs")
    if free_bytes < LOW_DISK_BYTES:
        return Finding("disk", "note", text, "checkpoints of large models need more; see checkpoint.keep")
    return Finding("disk", "ok", text)
