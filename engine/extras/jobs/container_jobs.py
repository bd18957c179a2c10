"""Writes a job that runs in a container: Kubernetes (Job, JobSet), Hugging Face Jobs, Modal, RunPod, dstack. Submits
nothing.

In the container torchrun starts one `tunedeck train` for each device. Runs lie on a volume, under a job id that is the
same at every start: a container that is started again, after a preemption too, goes on from its last checkpoint.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from engine.config.load import dump_run_spec
from engine.extras.jobs.cluster_scripts import REJOINING, SECONDS_TO_SAVE, Job, local_files, typed_destinations
from engine.launch.environment import export_lines

VOLUME = "/workspace"
"""Where the volume is mounted; the Dockerfile's user may write there."""
SPEC_FILE = "/etc/tunedeck/run.toml"
PORT = 29400
HOURS = 24
DISRUPTION = {"type": "DisruptionTarget", "status": "True"}


@dataclass(frozen=True)
class Container:
    job: Job
    target: str
    image: str
    gpu: str | None
    """What the target calls the GPU, or the machine."""

    @property
    def name(self) -> str:
        """As Kubernetes allows it."""
        return re.sub("[^a-z0-9]+", "-", self.job.spec.name.lower()).strip("-")[:48].strip("-") or "run"

    @property
    def devices(self) -> int:
        return self.job.spec.profile.device.count

    @property
    def nodes(self) -> int:
        return self.job.spec.profile.nodes.count

    @property
    def restarts(self) -> int:
        return self.job.spec.profile.nodes.max_restarts

    @property
    def spec_text(self) -> str:
        return dump_run_spec(self.job.spec)

    @property
    def environment(self) -> dict[str, str]:
        """What has to outlive a container is on the volume."""
        digest = hashlib.sha256(self.spec_text.encode()).hexdigest()[:12]
        return {
            "TUNEDECK_JOB": f"{self.target}-{self.name}-{digest}",
            "TUNEDECK_RUNS": f"{VOLUME}/runs",
            "TUNEDECK_STATE": f"{VOLUME}/.state",
            "TUNEDECK_CACHE": f"{VOLUME}/.cache/tunedeck",
            "HF_HOME": f"{VOLUME}/.cache/huggingface",
        }

    @property
    def resources(self) -> dict[str, int]:
        return {"nvidia.com/gpu": self.devices} if self.job.is_cuda else {}


def start_script(box: Container, *, before: str = "", several: bool = False) -> str:
    """The bash script that the container executes. `before` are lines to run first; `several`: on each machine of a
    JobSet."""
    rendezvous = (
        [f'--nnodes={box.nodes} --rdzv-backend=c10d --rdzv-id="$TUNEDECK_JOB" --rdzv-endpoint="$HEAD:{PORT}"',
         '--rdzv-conf="is_host=$is_host" --local-addr="$POD_IP"']
        if several else ["--standalone"]
    )  # fmt: skip
    host = '[ "$JOB_COMPLETION_INDEX" = 0 ] && is_host=true || is_host=false\n' if several else ""
    arguments = " \\\n  ".join(
        [
            "exec python3 -P -m torch.distributed.run",
            *rendezvous,
            f"--nproc-per-node={box.devices} --max-restarts={box.restarts}",
            f'"$TUNEDECK" train --run-spec "$SPEC" --runs "$TUNEDECK_RUNS"{typed_destinations(box.job.spec)}',
        ]
    )
    setup = f"{box.job.setup}\n" if box.job.setup else ""
    return f"""\
{setup}set -euo pipefail
SPEC=${{TUNEDECK_SPEC_FILE:-{SPEC_FILE}}}
{before}mkdir -p "$TUNEDECK_RUNS" "$TUNEDECK_STATE"
TUNEDECK=$(python3 -c 'import tunedeck; print(tunedeck.__file__)')
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SECONDS_TO_SAVE - 20}
{REJOINING if several else ""}
{export_lines(box.job.spec)}{host}{arguments}
"""


def _with_spec(box: Container) -> str:
    """Lines that write the run spec, for targets that bring no file into the container."""
    packed = base64.b64encode(box.spec_text.encode()).decode()
    return f'SPEC=$(mktemp --suffix=.run.toml)\nbase64 -d <<< {packed} > "$SPEC"\n'


def _assumptions(box: Container, submit: str, *more: str) -> str:
    """The comment at the top of each file."""
    lines = [
        f"{box.job.spec.name}, for {box.target}. Submit with: {submit}",
        f"- The image {box.image} contains Tunedeck (as built by the Dockerfile in Tunedeck's repository).",
        f"- {VOLUME} is a persistent volume with space for runs, checkpoints and the model.",
        "- If it is submitted again, the same run continues; for a new run, launch with another --name.",
        "- If the model needs a token, HF_TOKEN is set in the container as a secret.",
        *(f"- {line}" for line in more),
    ]
    if files := local_files(box.job):
        lines.append("- These files of this machine are on the volume, at the same paths in the container:")
        lines += [f"    {path}" for path in files]
    return "".join(f"# {line}\n" for line in lines)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Scripts as blocks that can be read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _yaml(*documents: dict[str, Any]) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=4096))


def kubernetes(box: Container) -> str:
    job = {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": box.name},
        "spec": {
            "backoffLimit": box.restarts,
            # An eviction or a preemption is no failure.
            "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [DISRUPTION]}]},
            "template": {"spec": _pod(box, start_script(box))},
        },
    }  # fmt: skip
    note = "One machine; its restarts count against backoffLimit, evictions do not."
    return _assumptions(box, "kubectl apply -f FILE", note) + _yaml(*_config_and_volume(box, "ReadWriteOnce"), job)


def jobset(box: Container) -> str:
    head = f"{box.name}-node-0-0.{box.name}"
    pod = _pod(box, start_script(box, several=True))
    pod["containers"][0]["env"] += [
        {"name": "HEAD", "value": head},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    each = {
        "parallelism": box.nodes, "completions": box.nodes, "completionMode": "Indexed", "backoffLimit": 0,
        "template": {"spec": pod},
    }  # fmt: skip
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": box.name},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": box.restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": each}}],
        },
    }  # fmt: skip
    note = f"{box.nodes} machines, which find each other at {head}:{PORT}; all mount the volume (ReadWriteMany)."
    return _assumptions(box, "kubectl apply -f FILE", note) + _yaml(*_config_and_volume(box, "ReadWriteMany"), made)


def _config_and_volume(box: Container, access: str) -> list[dict[str, Any]]:
    config = {"metadata": {"name": box.name}, "data": {"run.toml": box.spec_text}}
    claim = {"accessModes": [access], "resources": {"requests": {"storage": "200Gi"}}}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", **config},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "tunedeck"}, "spec": claim},
    ]


def _pod(box: Container, script: str) -> dict[str, Any]:
    mounts = {"workspace": VOLUME, "spec": SPEC_FILE.rpartition("/")[0], "shm": "/dev/shm"}
    container: dict[str, Any] = {
        "name": "train",
        "image": box.image,
        "command": ["bash", "-c", script],
        "env": [{"name": name, "value": value} for name, value in box.environment.items()],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    if box.resources:
        container["resources"] = {"limits": box.resources}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SECONDS_TO_SAVE,
        "securityContext": {"fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": "tunedeck"}},
            {"name": "spec", "configMap": {"name": box.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def dstack(box: Container) -> str:
    task: dict[str, Any] = {
        "type": "task",
        "name": box.name,
        "image": box.image,
        "env": [f"{name}={value}" for name, value in box.environment.items()],
        "commands": [start_script(box, before=_with_spec(box))],
        "volumes": [{"name": "tunedeck", "path": VOLUME}],
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": f"{HOURS}h"},
        "spot_policy": "auto",
        "stop_duration": f"{SECONDS_TO_SAVE}s",
    }
    if box.job.is_cuda:
        task["resources"] = {"gpu": f"{box.gpu}:{box.devices}", "shm_size": "16GB"}
    return _assumptions(box, "dstack apply -f FILE", 'The volume "tunedeck" exists (type: volume).') + _yaml(task)


def hf_jobs(box: Container) -> str:
    words = ["hf", "jobs", "run", "--name", box.name, "--flavor", box.gpu or "cpu-basic", "--timeout", f"{HOURS}h"]
    words += ["--attempts", str(box.restarts + 1), "--detach", "--secrets", "HF_TOKEN"]
    words += [word for name, value in box.environment.items() for word in ("--env", f"{name}={value}")]
    script = start_script(box, before=_with_spec(box))
    notes = (
        f"The job runs for at most {HOURS} hours; for more, change --timeout.",
        f"These jobs have no persistent disk: without a volume (-v) at {VOLUME} that supports appending and "
        "file locks, a second attempt starts from the beginning, and only the result sent by finish.push "
        "remains.",
    )
    return (
        f"#!/bin/bash\n{_assumptions(box, 'bash FILE', *notes)}"
        + shlex.join([*words, box.image, "bash", "-c", script])
        + "\n"
    )


def modal(box: Container) -> str:
    gpu = f"\n    gpu={json.dumps(f'{box.gpu}:{box.devices}')}," if box.job.is_cuda else ""
    notes = ("A function ends after a day and is started again; retries cover this and preemptions.",)
    return f"""\
{_assumptions(box, "modal run --detach FILE", *notes)}
import subprocess

import modal

ENVIRONMENT = {json.dumps(box.environment, indent=4)}
SCRIPT = {json.dumps(start_script(box, before=_with_spec(box)))}

app = modal.App({json.dumps(box.name)})
volume = modal.Volume.from_name("tunedeck", create_if_missing=True)
image = modal.Image.from_registry({json.dumps(box.image)}).entrypoint([]).env(ENVIRONMENT)


@app.function(
    image=image,{gpu}
    volumes={{{json.dumps(VOLUME)}: volume}},
    timeout={HOURS * 3600},
    retries=modal.Retries(max_retries={max(1, min(10, box.restarts))}, initial_delay=0.0),
)
def train():
    subprocess.run(["bash", "-c", SCRIPT], check=True)


@app.local_entrypoint()
def main():
    train.remote()
"""


def runpod(box: Container) -> str:
    notes = (
        (
            "RUNPOD_API_KEY is set here. The pod keeps running and costs money until you remove it: runpodctl "
            "remove pod ID."
        ),
        "RunPod restarts a container when its command ends, so the script sleeps after the run has ended.",
    )
    script = start_script(box, before=_with_spec(box)).replace("exec python3", "python3")
    script = f"(\n{script}) || true\necho the run has ended; sleep infinity\n"
    packed = base64.b64encode(script.encode()).decode()
    return f"""\
{_assumptions(box, "python FILE", *notes)}
import os

import runpod

runpod.api_key = os.environ["RUNPOD_API_KEY"]
pod = runpod.create_pod(
    name={json.dumps(box.name)},
    image_name={json.dumps(box.image)},
    gpu_type_id={json.dumps(box.gpu)},
    gpu_count={box.devices},
    container_disk_in_gb=50,
    volume_in_gb=200,
    volume_mount_path={json.dumps(VOLUME)},
    env={json.dumps({**box.environment, "TUNEDECK_SCRIPT": packed}, indent=4)},
    docker_args="bash -c 'base64 -d <<< $TUNEDECK_SCRIPT | bash'",
)
print(pod["id"])
"""


class Target(NamedTuple):
    write: Callable[[Container], str]
    suffix: str
    submit: str
    gpu: str = ""
    """An example of what it calls a GPU; empty: it needs no name."""
    several: bool = False
    """Whether it takes several machines."""


CONTAINER_TARGETS = {
    "kubernetes": Target(kubernetes, ".k8s.yaml", "kubectl apply -f"),
    "jobset": Target(jobset, ".jobset.yaml", "kubectl apply -f", several=True),
    "hf-jobs": Target(hf_jobs, ".hf-jobs.sh", "bash", "a100-large"),
    "modal": Target(modal, ".modal.py", "modal run --detach", "H100"),
    "runpod": Target(runpod, ".runpod.py", "python", "NVIDIA H100 80GB HBM3"),
    "dstack": Target(dstack, ".dstack.yaml", "dstack apply -f", "H100"),
}
