"""Packs what a machine with a GPU and no network needs to run the suites of `benchmarks.gpu`: this checkout, the wheels
that its Python lacks, and a script.

Run: python -m benchmarks.gpu_kit --out DIR      (then on that machine: bash DIR/run.sh RESULTS [SECONDS])

The machine brings Python 3.12 with torch, triton, accelerate, safetensors, numpy, pandas and pyarrow. The script works
in slices: each call goes on where the last one stopped, and leaves RESULTS.tgz with all results so far.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 64 * 2**20
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
WHEELS = (
    "transformers", "tokenizers", "peft", "trl", "liger-kernel", "bitsandbytes", "datasets", "dill<0.4.2",
    "multiprocess<0.70.20", "xxhash", "textual", "rich", "markdown-it-py", "mdit-py-plugins", "linkify-it-py",
    "uc-micro-py", "platformdirs", "typer", "click", "pydantic", "annotated-types", "typing-inspection",
    "typing-extensions", "tomli", "tomlkit", "psutil", "nvidia-ml-py", "filelock",
)  # fmt: skip
"""What the machine lacks, or has in another version; of the versions in constraints.txt where that names one."""
CUDA_LIBRARY = "libbitsandbytes_cuda130.so"
"""The library of bitsandbytes for the CUDA of the machine's torch; those for other versions are left out."""
LEFT_OUT = ("docs/pictures/", "tests/")
SCRIPT = """#!/usr/bin/env bash
# bash run.sh RESULTS [SECONDS]: measure for so many seconds (480), on DEVICE (cuda); call it again to go on.
set -u
kit=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && results=$(cd "$1" && pwd)
end=$((SECONDS + ${2:-480}))
if [ ! -d "$kit/site" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$kit/site" "$kit"/wheels/*.whl || exit 3
fi
export PYTHONPATH="$kit/site:$kit/tree" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TUNEDECK_STATE="$results/state"
cd "$kit/tree"
[ -f "$results/doctor.txt" ] || python3 tunedeck.py doctor --gpus > "$results/doctor.txt" 2>&1
tail -n 20 "$results/doctor.txt"
for suite in smoke speed budget backoff edge; do
  left=$((end - SECONDS))
  [ "$left" -gt 10 ] || break
  python3 -m benchmarks.gpu "$suite" --out "$results" --device "${DEVICE:-cuda}" --limit "$left" \\
    | tee "$results/$suite.txt"
done
tar czf "$results.tgz" --exclude=runs --exclude=state -C "$(dirname "$results")" "$(basename "$results")"
"""


def without_other_libraries(wheel: Path) -> None:
    """Rewrite bitsandbytes' wheel with CUDA_LIBRARY and the library for CPUs alone: the others are 150 MB."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in whole.infolist():
            if is_kept(entry.filename):
                content = whole.read(entry)
                if entry.filename.endswith("/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if is_kept(line.partition(",")[0])).encode()
                kept.writestr(entry, content)
    smaller.replace(wheel)


def is_kept(name: str) -> bool:
    """Whether the file of bitsandbytes' wheel with this name goes along."""
    return not name.endswith(".so") or name.endswith((CUDA_LIBRARY, "_cpu.so"))


def download(wheels: Path) -> None:
    """Download WHEELS, for the machine's Python, and what pydantic needs in exactly one version."""
    known = {line.partition("==")[0]: line for line in (ROOT / "constraints.txt").read_text("utf-8").split()}
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(wheels),
    ]
    command += ["--python-version", PYTHON, "--implementation", "cp"]
    command += [part for platform in PLATFORMS for part in ("--platform", f"{platform}_x86_64")]
    subprocess.run([*command, *(known.get(name, name) for name in WHEELS)], check=True)
    (pydantic,) = wheels.glob("pydantic-*.whl")
    with zipfile.ZipFile(pydantic) as files:
        metadata = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(metadata).decode().splitlines()
    core = next(line.split()[1] for line in lines if line.startswith("Requires-Dist: pydantic-core=="))
    subprocess.run([*command, core], check=True)


def make_kit(out: Path) -> int:
    """Write the kit into the empty or missing folder `out`; returns its bytes."""
    wheels, tree = out / "wheels", out / "tree"
    wheels.mkdir(parents=True)
    download(wheels)
    for wheel in wheels.glob("bitsandbytes-*.whl"):
        without_other_libraries(wheel)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    (out / "run.sh").write_text(SCRIPT, "utf-8")
    return sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def main() -> int:
    """Make the kit; returns 1 if it is larger than MOST_BYTES."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the kit, which must not exist")
    out = parser.parse_args().out
    size_bytes = make_kit(out)
    print(f"{out}: {size_bytes / 2**20:.1f} of {MOST_BYTES >> 20} MiB; on the machine: bash run.sh RESULTS [SECONDS]")
    return int(size_bytes > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
