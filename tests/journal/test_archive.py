"""A run goes into one file and comes out as the same run elsewhere; nothing else comes out of such a file."""

from __future__ import annotations

import json
import stat
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
    with pytest.raises(UsageError, match="exists already"):
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
    with pytest.raises(UsageError, match="no exported run"):
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
    with pytest.raises(UsageError, match="there is no file"):
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
