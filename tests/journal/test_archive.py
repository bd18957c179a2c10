"""A run goes into one file and comes out as the same run elsewhere; nothing else comes out of such a file."""

from __future__ import annotations

import json
import os
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from engine.config.load import load_run_spec
from engine.config.schema.run import Limits
from engine.errors import SpecError, UsageError
from engine.journal import archive
from engine.journal.archive import export_run, import_run
from engine.journal.directory import RunDirectory
from engine.journal.events import EventWriter
from engine.journal.summary import summarise
from tests.train.run_helpers import make_spec, new_run, write_samples


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with an event, a score, a result, and files that stay at home."""
    spec = make_spec(write_samples(tmp_path / "samples.jsonl", count=4))
    limits = Limits(on_finish="touch /tmp/x", trust_remote_code=True)
    made = new_run(tmp_path / "runs", spec.model_copy(update={"limits": limits}))
    with EventWriter(made) as writer:
        writer.write("run_finished", status="done", exit_code=0, result="adapter", reason="", error=None)
    made.kept_scores.mkdir()
    (made.kept_scores / "answers.jsonl").write_text("{}\n")
    made.adapter.mkdir()
    (made.adapter / "adapter_model.safetensors").write_bytes(b"weights")
    made.log.write_text("secret")
    (made.kept_scores / "link").symlink_to("/etc/passwd")
    return made


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_run_comes_out_as_it_was(run: RunDirectory, tmp_path: Path) -> None:
    export_run(run, tmp_path / "one.tunedeck", weights=False)
    made = import_run(tmp_path / "one.tunedeck", tmp_path / "elsewhere")
    assert made.name == run.name and summarise(made).status == summarise(run).status == "done"
    assert names(made.path) == {"run.toml", "plan.json", "events.jsonl", "evaluations/answers.jsonl"}
    assert made.events.read_bytes() == run.events.read_bytes()
    before, after = (load_run_spec(each.run_toml) for each in (run, made))
    assert after == before
    export_run(run, tmp_path / "two.tunedeck", weights=True)
    again = import_run(tmp_path / "two.tunedeck", tmp_path / "elsewhere")
    assert again.name == f"{run.name}-2" and (again.adapter / "adapter_model.safetensors").read_bytes() == b"weights"
    with pytest.raises(UsageError, match="already exists"):
        export_run(run, tmp_path / "two.tunedeck", weights=True)


def test_limits_are_left_out_on_both_sides(run: RunDirectory, tmp_path: Path) -> None:
    export_run(run, tmp_path / "one.tunedeck", weights=False)
    with zipfile.ZipFile(tmp_path / "one.tunedeck") as opened:
        assert b"touch" not in opened.read(f"{run.name}/run.toml")
    forged = tmp_path / "forged"
    with zipfile.ZipFile(forged, "w") as opened:
        opened.write(run.run_toml, "r/run.toml")  # with the limits
    assert b"touch" not in import_run(forged, tmp_path / "elsewhere").run_toml.read_bytes()


LINK = stat.S_IFLNK | 0o777
DEVICE = stat.S_IFBLK | 0o600
HOSTILE: dict[str, tuple[str, int]] = {
    "climbs": ("r/evaluations/../../../x", 0),
    "is absolute": ("/etc/x", 0),
    "is of another run": ("other/plan.json", 0),
    "is a link": ("r/evaluations/x", LINK),
    "is a device": ("r/evaluations/x", DEVICE),
    "is hidden": ("r/evaluations/.x", 0),
    "is a request": ("r/control/stop", 0),
    "is a checkpoint": ("r/checkpoints/step-00000001/model.safetensors", 0),
    "is a backslash": ("r/evaluations/..\\x", 0),
    "is there twice": ("r/RUN.toml", 0),
    "is the folder of another": ("r/run.toml/x", 0),
    "has a name that no disk takes": (f"r/evaluations/{'x' * 300}", 0),
    "is deeper than any path": ("r/evaluations" + "/x" * 600, 0),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_no_run_has_is_refused_and_nothing_is_written(run: RunDirectory, tmp_path: Path, case: str) -> None:
    name, mode = HOSTILE[case]
    source, target = tmp_path / "hostile", tmp_path / "elsewhere"
    with zipfile.ZipFile(source, "w") as opened:
        opened.write(run.run_toml, "r/run.toml")
        member = zipfile.ZipInfo(name)
        member.external_attr = mode << 16
        opened.writestr(member, "/etc/passwd")
    with pytest.raises(UsageError, match="not an exported run"):
        import_run(source, target)
    assert not target.exists() or not list(target.iterdir())


def test_what_unpacks_to_too_much_or_is_damaged_is_refused(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "large", tmp_path / "elsewhere"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.write(run.run_toml, "r/run.toml")
        opened.writestr("r/adapter/x.safetensors", bytes(2**22))
        opened.writestr("r/events.jsonl", bytes(2**20))
    for limit, value in (("MAX_BYTES", 2**19), ("MAX_FILES", 2)):
        with monkeypatch.context() as changed:
            changed.setattr(archive, limit, value)
            with pytest.raises(UsageError, match="more than"):
                import_run(source, target)
    with monkeypatch.context() as changed:
        changed.setattr(archive, "MAX_BYTES", 2**20 + 2**16)
        with pytest.raises(UsageError, match="unpacks to"):
            import_run(source, target)
    data = source.read_bytes()
    for damaged in (b"", b"no archive", data[: len(data) // 2], data[:200] + b"\xff" * 20 + data[220:]):
        source.write_bytes(damaged)
        with pytest.raises(UsageError):
            import_run(source, target)
    with pytest.raises(UsageError, match="does not exist"):
        import_run(tmp_path / "nothing", target)
    assert not target.exists() or not list(target.iterdir())


def test_a_spec_that_no_engine_takes_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "odd"
    with zipfile.ZipFile(source, "w") as opened:
        opened.writestr("r/run.toml", "kind = 1")
        opened.writestr("r/plan.json", json.dumps({}))
    with pytest.raises(SpecError):
        import_run(source, tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["--help", "-x", "last", ".hidden", "..", "x" * 300, "a\x1b[2J", "with space"])
def test_a_run_name_that_a_command_would_not_take_is_rejected(run: RunDirectory, tmp_path: Path, name: str) -> None:
    source = tmp_path / "named"
    with zipfile.ZipFile(source, "w") as opened:
        opened.write(run.run_toml, f"{name}/run.toml")
    with pytest.raises(UsageError, match="not an exported run"):
        import_run(source, tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())


def overwrite(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


def damaged_archives(run: RunDirectory, folder: Path) -> dict[str, bytes]:
    """Archives by what is wrong with them."""
    found = {}
    for title, method in (("lzma", zipfile.ZIP_LZMA), ("bzip2", zipfile.ZIP_BZIP2), ("deflate", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(folder / title, "w", method) as opened:
            opened.write(run.run_toml, "r/run.toml")
        found[title] = overwrite((folder / title).read_bytes(), 60, bytes(range(7, 37)))
    with zipfile.ZipFile(folder / "names", "w") as opened:
        opened.write(run.run_toml, "r/run.toml")
        opened.writestr("r/\u00e9\u00e9", "x")
    with zipfile.ZipFile(folder / "nameless", "w") as opened:
        opened.write(run.run_toml, "r/run.toml")
        opened.writestr("QQ", "x")
    found["a member without a name"] = (folder / "nameless").read_bytes().replace(b"QQ", b"\0Q")  # it ends at the 0
    whole = (folder / "names").read_bytes()
    found["a name that is no text"] = whole.replace("\u00e9".encode(), b"\xff\xfe")
    end = whole.rindex(b"PK\x05\x06")
    found["a list before the file"] = overwrite(whole, end + 16, b"\xff\xff\xff\x7f")
    found["a list longer than the file"] = overwrite(whole, end + 12, b"\xff\xff\xff\x7f")
    entry = whole.index(b"PK\x01\x02")
    found["a member before the file"] = overwrite(whole, entry + 42, b"\xff\xff\xff\xfe")
    found["an unknown version"] = overwrite(whole, entry + 6, b"\xff\x00")
    found["an encrypted member"] = overwrite(whole, entry + 8, b"\x01\x00")
    return found


def test_a_damaged_archive_is_rejected_as_one(run: RunDirectory, tmp_path: Path) -> None:
    for title, data in damaged_archives(run, tmp_path).items():
        (tmp_path / "damaged").write_bytes(data)
        with pytest.raises(UsageError, match="not an exported run") as caught:
            import_run(tmp_path / "damaged", tmp_path / "elsewhere")
        assert caught.value.exit_code == 2, title
        assert not list((tmp_path / "elsewhere").iterdir()), title


@pytest.mark.parametrize(("name", "why"), [(b"r/%06d", "more than 20,000 files"), (b"r/%0700d", "larger than 16 MiB")])
def test_a_list_of_many_files_is_rejected_in_little_memory(tmp_path: Path, name: bytes, why: str) -> None:
    source, entries, size = tmp_path / "many", 30_000, 0
    with source.open("wb") as file:
        for number in range(entries):
            entry = name % number
            header = struct.pack("<I6H3I5H2I", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, len(entry), 0, 0, 0, 0, 0, 0)
            size += file.write(header + entry)
        file.write(struct.pack("<I4H2IH", 0x06054B50, 0, 0, entries, entries, size, 0, 0))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=why):
            import_run(source, tmp_path / "elsewhere")
        assert tracemalloc.get_traced_memory()[1] < 60 * 2**20
    finally:
        tracemalloc.stop()


HOLD_DRAFT = """
import signal, sys
from pathlib import Path
from engine.journal import archive
archive._unpack = lambda *_: (print("unpacking", flush=True), signal.pause())
archive.import_run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_later_import_removes_the_draft_of_a_killed_one_and_no_other(run: RunDirectory, tmp_path: Path) -> None:
    source, target = tmp_path / "one.tunedeck", tmp_path / "elsewhere"
    export_run(run, source, weights=False)
    command = [sys.executable, "-c", HOLD_DRAFT, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"unpacking\n"
        import_run(source, target)
        assert len(list(target.glob(".new-*"))) == 1, "the draft of a living import"
        os.kill(process.pid, signal.SIGKILL)
    import_run(source, target)
    assert sorted(path.name for path in target.iterdir()) == [run.name, f"{run.name}-2"]


def test_links_inside_a_run_are_exported_as_files_and_others_named_or_rejected(
    run: RunDirectory, tmp_path: Path
) -> None:
    (run.path / "evaluations" / "inside").symlink_to("answers.jsonl")
    (run.adapter / "linked.json").symlink_to("../evaluations/answers.jsonl")
    _, left_out = export_run(run, tmp_path / "one.tunedeck", weights=True)
    assert left_out == ["evaluations/link"]
    made = import_run(tmp_path / "one.tunedeck", tmp_path / "elsewhere")
    assert (made.adapter / "linked.json").read_text() == (made.kept_scores / "inside").read_text() == "{}\n"
    (run.adapter / "tokenizer.model").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match=r"adapter/tokenizer\.model links to a path outside the run's folder"):
        export_run(run, tmp_path / "two.tunedeck", weights=True)
