"""The step of the build that pyproject.toml cannot express: `tunedeck.py` becomes `tunedeck/__init__.py`, beside which
lies AGENTS.md, which tells programs how to use the command line.

`[tool.hatch.build.targets.wheel.sources]` renames folders, but no files. `force-include` would rename a file, but in
editable installations too, where `tunedeck.py` must stay where it is. A hook can tell the two apart.

Try: `pip wheel --no-deps .`, and `python -m zipfile -l` on the result.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class EntryFile(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is hatchling's own builder configuration
    """A build hook that puts `tunedeck.py` into the wheel as `tunedeck/__init__.py`, and AGENTS.md."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to a wheel whose `version` is "standard"; an "editable" installation gets no file."""
        if version == "standard":
            build_data["force_include"]["tunedeck.py"] = "tunedeck/__init__.py"
            build_data["force_include"]["AGENTS.md"] = "tunedeck/AGENTS.md"
