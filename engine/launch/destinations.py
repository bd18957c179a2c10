"""Where a run may send something: a destination of [finish] counts once its user has typed it himself. And the process
that tells [finish] webhook of the end, failure and alerts; a server that hangs or refuses holds no run."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, cast
from urllib.parse import urlsplit

from engine.config.check.overrides import parse_overrides
from engine.config.files.trust import is_kept_destination, keep_destination
from engine.config.load import load_run_spec
from engine.config.schema.finish import PUSH, WEBHOOK, Finish
from engine.config.schema.run import RunSpec
from engine.errors import KILLED_CODE, EnvironmentProblem
from engine.journal.directory import RunDirectory
from engine.journal.event_text import clean, format_duration, format_number
from engine.journal.events import Event, EventTail, EventWriter, end_of_events
from engine.journal.files import locked
from engine.journal.forwarding import Record, read_record, write_record
from engine.journal.liveness import identify, is_alive
from engine.journal.summary import summarise
from engine.launch.process import ENTRY_FILE, engine_environment

log = logging.getLogger(__name__)

RECORD = "webhook"
"""Its files in trackers/ of a run."""

ALERTS = frozenset(
    {"no_gradient", "gradient_spike", "plateau", "not_finite", "slow_data", "disk_full", "host_memory", "rank_lost"}
)  # fmt: skip
"""Codes of the warnings that a person who is not there wants to hear of."""

FAILED = ("failed", "oom", "killed")
SCHEMA_VERSION = 1
POLL_SECONDS = 0.5
SEND_SECONDS = 4.0
"""For one attempt, of which there are two."""
HAND_OVER_SECONDS = 10.0
"""How long a process that has ended its run waits for the last message, because a container may end with it."""
INSIDE = f"{WEBHOOK} (inside)"
"""Key of the record that a webhook was at an address of this machine or network when its user typed it."""
METADATA = frozenset({"168.63.129.16"})
"""Public addresses at which a cloud tells its machines their secrets; those of the others are link-local or private."""
MOST_CHARACTERS = 1500
"""Of a message: Discord refuses more than 2,000."""


def allow_typed(finish: Finish, overrides: Sequence[str]) -> None:
    """Record the destinations that are among `overrides`, this command line's --set. Raises EnvironmentProblem."""
    typed = {".".join(override.key) for override in parse_overrides(overrides)[0]}
    for key, target in finish.destinations().items():
        if key in typed and (key != PUSH or not finish.push_public or "finish.push_public" in typed):
            keep_destination(key, target)
            if key == WEBHOOK and _leads_inside(finish):
                keep_destination(INSIDE, target)


def _leads_inside(finish: Finish) -> bool:
    """Return whether the webhook's name leads to an address of this machine or network now."""
    try:
        parts = urlsplit(webhook_url(finish))
        return any(map(is_inside, _addresses(parts.hostname or "", parts.port or 443)))
    except (OSError, ValueError, EnvironmentProblem):  # no such name now: it is looked up again before it is used
        return False


def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host. Raises OSError if there are none."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def is_inside(address: str) -> bool:
    """Return whether an IP address is one of this machine, of a private or link-local network, or of a cloud's service
    that tells a machine its secrets."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or found
    return not found.is_global or found.is_multicast or str(found) in METADATA


def may_lead_inside(finish: Finish) -> bool:
    """Return whether the webhook may be at an address of this machine or network: its user has typed that address, or
    a name that led to one when he typed it."""
    text = finish.webhook or ""
    if is_kept_destination(INSIDE, text):
        return True
    return not text.startswith("$") and _is_address(urlsplit(text).hostname or "")


def _is_address(host: str) -> bool:
    """Return whether a host shows by itself that it is on this machine or an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def allowed(finish: Finish, key: str) -> bool:
    """Whether `key` is set, to a destination that this user has typed once."""
    target = finish.destinations().get(key)
    return target is not None and is_kept_destination(key, target)


def notes_on_destinations(finish: Finish) -> list[str]:
    """Of each destination, that it is used, or what is missing."""
    return [_note(finish, key, target) for key, target in finish.destinations().items()]


def _note(finish: Finish, key: str, target: str) -> str:
    if not allowed(finish, key):
        value = finish.webhook if key == WEBHOOK else finish.push
        public = " --set finish.push_public=true" if key == PUSH and finish.push_public else ""
        return (
            f"{key}: nothing is sent, because the destination was set by a file and not by you; to allow it: "
            f"--set {key}='{value}'{public}"
        )
    if key == PUSH:
        return f"{key}: the result will be sent to {target.replace(' ', ', ')} when the run is done"
    try:
        return f"{key}: {host_of(webhook_url(finish))} is notified of the run's end, failure and alerts"
    except EnvironmentProblem as error:
        return error.found


def webhook_url(finish: Finish) -> str:
    """Raises EnvironmentProblem if the variable that it names holds no URL."""
    text = finish.webhook or ""
    if not text.startswith("$"):
        return text
    url = os.environ.get(text[1:], "")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise EnvironmentProblem(f"finish.webhook: {text} is not set to a URL", fix=f"export {text[1:]}=https://…")
    return url


def host_of(url: str) -> str:
    """All of a webhook's URL that may be shown: the rest is a secret."""
    return urlsplit(url).hostname or "the webhook"


@contextmanager
def webhook_told(spec: RunSpec, directory: RunDirectory) -> Iterator[None]:
    """Inside the block, a process tells [finish] webhook what happens to the run; after it, wait at most
    HAND_OVER_SECONDS. A message that did not arrive becomes a warning in the journal. Needs the claim on the run."""
    if not allowed(spec.recipe.finish, WEBHOOK):
        yield
        return
    process = _start(directory)
    yield
    try:
        code = process.wait(HAND_OVER_SECONDS)
        problem = read_record(directory, RECORD).error if code else ""
    except subprocess.TimeoutExpired:
        code, problem = 1, f"the webhook did not accept the last message within {HAND_OVER_SECONDS:g} s"
    except EnvironmentProblem as error:
        problem = error.found
    if code:
        problem = problem or f"the process that calls the webhook exited with {code}"
        log.warning("webhook: %s", problem)
        fix = f"see {directory.trackers / RECORD}.log; the run itself is not affected"
        with EventWriter(directory) as writer:
            writer.write("warning", code="webhook", text=problem, fix=fix)


def _start(directory: RunDirectory) -> subprocess.Popen[bytes]:
    """In an OS session of its own: what kills the engine shall not keep its end from being told."""
    directory.trackers.mkdir(exist_ok=True)
    place = ["--engine", str(os.getpid()), "--from", str(end_of_events(directory.events))]
    with (directory.trackers / f"{RECORD}.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", str(ENTRY_FILE), "_tell", str(directory.path), *place],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=engine_environment(),
            start_new_session=True,
        )


def tell_webhook(directory: RunDirectory, engine_pid: int, offset: int) -> int:
    """Send a message for each alert after byte `offset` of the events, and one for the end of the run or of its
    process; returns how many did not arrive. The last reason is in the record."""
    engine = identify(engine_pid)
    tail, ended, failed = EventTail(directory.events, offset=offset), False, 0
    directory.trackers.mkdir(exist_ok=True)
    with locked(directory.trackers / f"{RECORD}.lock", timeout_seconds=-1.0):
        write_record(directory, RECORD, Record())
        finish = load_run_spec(directory.run_toml, own=True).recipe.finish
        url, inside = webhook_url(finish), may_lead_inside(finish)
        while not ended:
            alive = engine is not None and is_alive(engine)  # before reading: the last events are not missed
            events = tail.poll()
            if not alive and not any(event["kind"] == "run_finished" for event in events):
                now = datetime.now(UTC).isoformat(timespec="seconds")
                events.append({"kind": "run_finished", "status": "killed", "exit_code": KILLED_CODE, "time": now})
            for event in events:
                if (message := message_of(event, directory)) is not None:
                    failed += not _sent(directory, url, message, inside)
                    ended = ended or message["event"] != "alert"
            if not ended:
                time.sleep(POLL_SECONDS)
    return failed


def _sent(directory: RunDirectory, url: str, message: dict[str, Any], inside: bool) -> bool:
    problem = send(url, message, inside=inside)
    if problem:
        write_record(directory, RECORD, Record(error=problem))
        sys.stderr.write(f"{problem}: {message['text']}\n")
        sys.stderr.flush()
    return not problem


def message_of(event: Event, directory: RunDirectory) -> dict[str, Any] | None:
    """What is told of an event; None for most. No paths and no rows beyond those in an error's own words."""
    common = {"schema": SCHEMA_VERSION, "run": directory.name, "host": platform.node(), "time": event["time"]}
    if event["kind"] == "warning" and event["code"] in ALERTS:
        stage = f", stage {event['stage']}" if event.get("stage") else ""
        text = f"{directory.name}{stage}: {event['text']}" + (f"; {event['fix']}" if event["fix"] else "")
        return {"event": "alert", **common, "code": event["code"], "step": event.get("step"), "text": _short(text)}
    if event["kind"] != "run_finished":
        return None
    status, found = event["status"], summarise(directory)
    loss = found.metrics.get("train_loss")
    facts = [f"step {found.step}" + (f" of {found.max_steps}" if found.max_steps else "")]
    facts += [f"loss {format_number(loss)}"] if isinstance(loss, int | float) else []
    facts += [format_duration(found.total_seconds)] if found.total_seconds else []
    text = f"{directory.name}: {status}, {', '.join(facts)}"
    if reason := event.get("error") or event.get("reason"):
        text += f"; {reason}"
    if status == "killed":
        text += f"; its process has ended; continue with: tunedeck resume {directory.name}"
    figures = {"step": found.step, "max_steps": found.max_steps, "loss": loss, "seconds": found.total_seconds}
    kind = "failure" if status in FAILED else "end"
    return {"event": kind, **common, "status": status, "exit_code": event["exit_code"], **figures, "text": _short(text)}


def _short(text: str) -> str:
    text = " ".join(clean(text).split())
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def body_for(url: str, message: dict[str, Any]) -> dict[str, Any]:
    """Slack's and Discord's shape where the host is theirs, else the message as it is. Neither notifies a channel
    because of a word in an error."""
    host = host_of(url).lower()
    if host == "hooks.slack.com" or host.endswith(".slack.com"):
        text = message["text"].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": text}
    if host in ("discord.com", "discordapp.com") or host.endswith((".discord.com", ".discordapp.com")):
        return {"content": message["text"], "allowed_mentions": {"parse": []}}
    return message


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A message goes where its user said, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Checked:
    """Makes a connection's socket to an address that was looked at: a name may lead elsewhere the next time."""

    def __init__(self, inside: bool) -> None:
        self._inside = inside

    def __call__(self, address: tuple[str, int], timeout: float, source: Any = None) -> socket.socket:
        """Raise OSError for an address inside that is not allowed, or that cannot be reached."""
        found = _addresses(*address)
        if not self._inside and any(map(is_inside, found)):
            raise PermissionError(
                f"its name resolves to {found[0]}, an address of this machine or network; to allow it, set it "
                f"again yourself: --set {WEBHOOK}=URL"
            )
        return socket.create_connection((found[0], address[1]), timeout, source)


class _PlainHandler(urllib.request.HTTPHandler):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self._make = _Checked(inside)

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(cast("Any", self._connection), request)

    def _connection(self, host: str, **options: Any) -> HTTPConnection:
        connection = HTTPConnection(host, **options)
        vars(connection)["_create_connection"] = self._make
        return connection


class _TlsHandler(urllib.request.HTTPSHandler):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self._make = _Checked(inside)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(cast("Any", self._connection), request)

    def _connection(self, host: str, **options: Any) -> HTTPSConnection:
        connection = HTTPSConnection(host, **options)
        vars(connection)["_create_connection"] = self._make
        return connection


def _opener(url: str, inside: bool) -> urllib.request.OpenerDirector:
    """Return what opens the URL: without redirects, and, but for a proxy of the user, at an address that is allowed."""
    parts = urlsplit(url)
    has_proxy = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")
    handlers = [] if has_proxy else [_PlainHandler(inside), _TlsHandler(inside)]
    return urllib.request.build_opener(_NoRedirect, *handlers)


def send(url: str, message: dict[str, Any], *, inside: bool | None = None) -> str:
    """Try twice; returns why it did not arrive, else "". `inside`: it may be at an address of this machine or network;
    by default if the URL shows the address. Ends this process if that takes far longer than it may."""
    inside = _is_address(urlsplit(url).hostname or "") if inside is None else inside
    body = json.dumps(body_for(url, message)).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "tunedeck"}
    problem = ""
    for _ in range(2):
        try:
            signal.alarm(round(3 * SEND_SECONDS))  # a look-up of the name has no limit of its own
            request = urllib.request.Request(url, body, headers)
            with _opener(url, inside).open(request, timeout=SEND_SECONDS):
                return ""
        except urllib.error.HTTPError as error:
            problem = f"the webhook at {host_of(url)} returned {error.code}"
        except (OSError, ValueError, HTTPException) as error:
            # The words of other errors may quote the URL.
            reason = getattr(error, "reason", error) if isinstance(error, OSError) else type(error).__name__
            problem = f"the webhook at {host_of(url)} cannot be reached: {reason}"
        finally:
            signal.alarm(0)
    return problem
