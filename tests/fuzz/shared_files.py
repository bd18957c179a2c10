"""Fuzzed files that people send each other: exported runs, configurations of other tools, tasks, globs and chats."""

from __future__ import annotations

import io
import re
import stat
import struct
import zipfile
from pathlib import Path
from typing import Any

import jinja2
import yaml
from hypothesis import strategies as st

from engine.config.load import check_text
from engine.config.name_patterns import matches, matches_end, no_match
from engine.errors import TunedeckError
from engine.extras.harness.task_files import refuse_untrusted_tasks
from engine.extras.harness.task_sandbox import TaskTemplates
from engine.extras.imports.convert import MAX_BYTES, draft_of, recipe_text
from engine.journal.archive import import_run
from engine.journal.chats import ChatInbox, conversations, read_chat
from engine.journal.event_text import describe_event
from engine.journal.events import EventTail
from engine.journal.index import list_runs
from tests.fuzz.inputs import HARM, as_json, damaged, json_files, spliced, texts, values
from tests.fuzz.runs import folder_run, refused, shown
from tests.journal.run_directories import RUN_TOML

# exported runs

SPEC = RUN_TOML.format(name="x").encode()
PLACES = [
    "r/run.toml", "r/plan.json", "r/events.jsonl", "r/labels.json", "r/evaluations/a.jsonl", "r/oom/step-3.json",
    "r/adapter/adapter_model.safetensors", "r/stages/01-a/run.toml", "r/stages/01-a/events.jsonl", "r/control/stop",
    "r/../x", "/etc/x", "../../x", "r/evaluations/../../../x", "r//run.toml", "r/.hidden", "r/evaluations",
    "--help/run.toml", "r/RUN.toml", "r/evaluations/\udce9", "r/evaluations/\u202e", "C:\\x",
    "r/model/" + "d/" * 60 + "x", "r/" + "n" * 300,
]  # fmt: skip
MODES = [
    0,
    stat.S_IFREG | 0o644,
    stat.S_IFLNK | 0o777,
    stat.S_IFIFO | 0o600,
    stat.S_IFBLK | 0o600,
    stat.S_ISUID | 0o4755,
]
METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Nearly exported runs: other members, modes and methods, false sizes, then bytes that are damaged."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("r/run.toml", draw(st.one_of(st.just(SPEC), spliced(SPEC))))
        for place in draw(st.lists(st.sampled_from(PLACES), max_size=5)):
            member = zipfile.ZipInfo(place.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
            member.external_attr = draw(st.sampled_from(MODES)) << 16
            member.compress_type = draw(st.sampled_from(METHODS))
            archive.writestr(member, draw(st.one_of(st.binary(max_size=60), st.just(bytes(300_000)))))
    data = written.getvalue()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(data) - 4)))
        number = draw(st.sampled_from([0, 1, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
        data = data[:at] + struct.pack("<I", number) + data[at + 4 :]
    return draw(st.one_of(st.just(data), spliced(data)))


def archive(data: bytes, folder: Path) -> None:
    """Nothing is left of a file that is not an exported run, and a run that is made lies in the runs folder."""
    source, runs = folder / "given.tunedeck", folder / "imported"
    source.write_bytes(data)
    before = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    try:
        made = import_run(source, runs)
    except TunedeckError as error:
        refused(error)
        assert not runs.is_dir() or {path.name for path in runs.iterdir()} == before
        return
    assert made.path.parent == runs
    assert all(path.is_dir() or stat.S_ISREG(path.lstat().st_mode) for path in made.path.rglob("*"))
    list_runs(runs)
    for path in sorted(made.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    made.path.rmdir()


# configurations of other tools

YAML = b"""base_model: Qwen/Qwen3-0.6B
adapter: lora
lora_r: 8
lora_target_modules: [q_proj, v_proj]
learning_rate: 1e-4
micro_batch_size: 2
datasets:
- {path: data/a.jsonl, type: alpaca}
sequence_len: 512
"""
HARMFUL = [
    "0x" + "f" * 5000, "1" * 100_000, ":".join(["1"] * 20_000), '"' + "1" * 100_000 + 'e5"', "1e999", ".nan", "-.inf",
    "&a [*a]", "*a", "!!python/object/apply:os.system [id]", "!function x.y", "<<: {a: 1}", "[" * 300, "{a: " * 300,
    "2026-99-99", '"\\U00110000"', "? [a]\n: b", "%YAML 1.99", "---", "...", "'${base_model}'", "(a|b)" * 30, "yes",
    "[" + "a," * 3000 + "]", "|\n  x", ">\n x", "\t", "0b" + "1" * 200, "1_" * 60, "~", '"' + "\\x41" * 500 + '"',
]  # fmt: skip
yaml_lines = st.lists(
    st.one_of(
        st.sampled_from(YAML.decode().splitlines(keepends=True)),
        st.tuples(
            st.sampled_from([line.partition(":")[0] for line in YAML.decode().splitlines()]),
            st.one_of(st.sampled_from(HARMFUL), texts, values.map(lambda value: as_json(value).decode())),
        ).map(lambda pair: f"{pair[0]}: {pair[1]}\n"),
        st.sampled_from(HARMFUL).map(lambda text: text + "\n"),
    ),
    max_size=10,
).map("".join)
yaml_files = st.one_of(spliced(YAML), yaml_lines.map(lambda text: YAML + text.encode("utf-8", "replace")),
                       yaml_lines.map(lambda text: text.encode("utf-8", "replace")))  # fmt: skip


def other_tool(data: bytes, folder: Path) -> None:
    """What is made of another tool's file is a recipe that can be read."""
    source = folder / "other.yml"
    source.write_bytes(data)
    try:
        made = recipe_text(draft_of(source), source.name)
    except TunedeckError as error:
        refused(error)
        return
    assert len(made) < 20 * MAX_BYTES
    check_text("recipe", made, "mine", "mine.toml")


# task files of lm-evaluation-harness

TASK = b"""task: mine
tag: [a]
include: parts/other.yaml
dataset_path: json
dataset_kwargs: {data_files: {test: d.jsonl}}
dataset_name: main
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{ choices[0] }}"
metric_list:
  - metric: exact_match
    aggregation: mean
filter_list:
  - {name: x, filter: [{function: regex, regex_pattern: "(a+)"}]}
repeats: 1
metadata: {version: 1.0}
"""
TASK_KEYS = [line.partition(b":")[0].decode() for line in TASK.splitlines() if line[:1].isalpha()]
CODE = [
    "!function x.y", "!!python/name:os.system", "!!python/object/apply:os.system [id]",
    "!<tag:yaml.org,2002:python/x> 1", "../../x", "/etc/passwd", "parts/../../x", "~/x", "http://169.254.169.254/",
    "zip://x::file:///etc/passwd", "{trust_remote_code: true}", "{<<: {trust_remote_code: true}}",
    "{data_files: 's3://b/k'}", "pandas", "./d", "owner/name", "[{metric: owner/code, hf_evaluate: true}]", "*shared",
    "&shared {class: x.Y}", "{? class : x.Y}", '{"cl\\x61ss": x.Y}', "[{task: t, class: x.Y}]", "1e9",
    "0x" + "f" * 60, "1:1:1", "!!int x", "!!int '" + "1:" * 3000 + "1'", "!!float -", "9999999",
    "!!binary aWQ=", "!!set {class}", "!!omap [class: x]",
]  # fmt: skip
TEMPLATES = [
    "{{ cycler.__init__.__globals__.os.system('id') }}", "{{ ''.__class__.__mro__ }}",
    "{% for a in range(10**9) %}{% endfor %}", "{{ q.__class__ }}",
    "{{ ('a' * 20 + 'b') | regex_replace('(a+)+c', '') }}", "{{ 10 ** 10 ** 10 }}", "{{ q * 10**10 }}",
    "{{ choices | join(', ') }}", "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ missing }}", "{{",
    "{{ q", "{{ q.format(choices) }}", "{{ '{0.__class__}'.format(q) }}", "{% set x = namespace() %}{{ x }}",
    "{{ self }}", "{{ lipsum.__globals__ }}", "{{ choices.append(1) }}", "{{ q[::-1] }}", "{{ dict(a=1) | tojson }}",
    "{{ q | attr('x') }}",
]  # fmt: skip
_task_lines = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(
                [*TASK_KEYS, "class", "use_prompt", "unsafe_code", "process_docs", "x: &shared {y", "custom"]
            ),
            st.one_of(st.sampled_from([*HARMFUL, *CODE]), texts, st.sampled_from(TEMPLATES).map(repr)),
        ).map(lambda pair: f"{pair[0]}: {pair[1]}\n"),
        st.sampled_from([*HARMFUL, *CODE]).map(lambda text: text + "\n"),
    ),
    max_size=6,
).map("".join)
task_texts = st.one_of(
    spliced(TASK),
    _task_lines.map(lambda text: TASK + text.encode("utf-8", "replace")),
    _task_lines.map(lambda text: text.encode("utf-8", "replace")),
)
task_files = st.tuples(task_texts, task_texts, st.lists(st.one_of(st.sampled_from(TEMPLATES), texts), max_size=1))


def task_file(given: tuple[bytes, bytes, list[str]], folder: Path) -> None:
    """A folder of tasks that needs no trust is read by lm-evaluation-harness's reader without anything that is
    constructed, opened or imported, and its templates are stopped, or write text."""
    tasks = folder / "tasks"
    (tasks / "parts").mkdir(parents=True, exist_ok=True)
    (tasks / "mine.yaml").write_bytes(given[0])
    (tasks / "parts" / "other.yaml").write_bytes(given[1])
    try:
        read = refuse_untrusted_tasks(tasks, trusted=False)
    except TunedeckError as error:
        refused(error)
    else:
        assert read is not None and not read.problems
        for data in given[:2]:
            _without_code(_plain_values(data), tasks)
    for template in given[2]:
        templates = TaskTemplates(
            jinja2.StrictUndefined, {"regex_replace": lambda text, old, new: re.sub(old, new, text)}
        )
        try:
            templates.render(template, {"q": "text", "choices": ["a", "b"]})
        except TunedeckError as error:
            refused(error)
        finally:
            templates.close()


def _plain_values(data: bytes) -> Any:
    """What lm-evaluation-harness makes of a file; a tag that names code is an error of yaml."""
    try:
        return yaml.load(data.decode(), yaml.SafeLoader)
    except (yaml.constructor.ConstructorError, ValueError, TypeError, OverflowError) as error:
        assert "!function" not in str(error) and "python/" not in str(error)
        return None


def _without_code(value: Any, tasks: Path) -> None:
    """Assert that no key of the values, merged ones too, runs code or leaves the folder."""
    if isinstance(value, dict):
        assert not {"class", "use_prompt", "unsafe_code", "hf_evaluate"} & set(value)
        options = value.get("dataset_kwargs")
        assert not isinstance(options, dict) or "trust_remote_code" not in options
        includes = value.get("include")
        for name in includes if isinstance(includes, list) else [includes]:
            assert not isinstance(name, str) or (tasks / name).resolve().is_relative_to(tasks.resolve())
        for inner in value.values():
            _without_code(inner, tasks)
    elif isinstance(value, list):
        for inner in value:
            _without_code(inner, tasks)


# globs

NAMES = [f"model.layers.{layer}.{part}" for layer in range(12) for part in ("self_attn.q_proj", "mlp.up_proj.weight")]
PARTS = [
    "*",
    "**",
    "?",
    "[a-z]",
    "[!a]",
    "[",
    "]",
    ".",
    "model",
    "layers",
    "q_proj",
    "*a*a*a",
    "\\",
    "[z-a]",
    "\n",
    "e",
]
globs = st.lists(st.sampled_from([*PARTS, *HARM]), max_size=60).map("".join)
globs = st.one_of(globs, globs.map(lambda glob: glob * 200), st.text(max_size=20))


def glob(pattern: str, folder: Path) -> None:
    """A glob is matched with every name, or named in an error that can be shown."""
    found = [name for name in NAMES if matches_end(pattern, name)]
    assert {name for name in NAMES if matches(pattern, name)} <= set(found)
    if not found:
        refused(no_match(pattern, NAMES, "method.targets"))


# chats

HEAD = {"seq": 1, "time": "2026-11-20T20:58:00Z", "stage": "", "rank": 0}
CHAT: list[dict[str, Any]] = [
    {"kind": "chat_started"},
    {"kind": "chat_ready", "models": ["a", "b"], "base": "a", "plain": ["b"], "settings": {"seed": 1}, "system": "s"},
    {"kind": "chat_note", "text": "n"},
    {"kind": "chat_refused", "text": "r"},
    {"kind": "chat_question", "text": "q", "images": ["x.png"]},
    {"kind": "chat_question", "text": "q", "again": True},
    {"kind": "chat_prompt", "model": "a", "text": "p", "tokens": 3},
    {"kind": "chat_tokens", "model": "a", "text": "t", "pieces": [["t", 0.5]]},
    {"kind": "chat_answer", "model": "a", "text": "t", "stopped_by": "end", "seconds": 1.0, "count": 2},
    {"kind": "chat_answered"},
    {"kind": "chat_undone"},
    {"kind": "chat_settings", "settings": {"seed": 2}, "system": None},
    {"kind": "run_finished", "status": "done", "exit_code": 0, "result": None, "error": None},
]  # fmt: skip
chat_lines = st.sampled_from(CHAT).flatmap(
    lambda event: st.one_of(damaged({**HEAD, **event}).map(as_json), spliced(as_json({**HEAD, **event})))
)
chats = st.tuples(
    st.lists(chat_lines, max_size=8).map(b"\n".join), json_files({"request": "ask", "text": "q", "images": ["x"]})
)


def chat(given: tuple[bytes, bytes], folder: Path) -> None:
    """The events and the requests of a chat."""
    directory = folder_run(folder)
    events, request = given
    directory.events.write_bytes(events + b"\n")
    state = read_chat(directory)
    for row in conversations(state):
        as_json(row)
    shown(text for event in EventTail(directory.events).poll() for text in [describe_event(event) or ""])
    directory.control.mkdir(exist_ok=True)
    (directory.control / "1-ask.json").write_bytes(request)
    inbox = ChatInbox(directory)
    inbox.must_stop()
    while inbox.next() is not None:
        pass
