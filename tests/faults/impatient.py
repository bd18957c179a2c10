"""`tunedeck` with little patience for a hub: its limits of time end after seconds, and tries follow each other at once.

`every_request.py` lets each request of a push hang. Not a test module. Try: `python -P -m tests.faults.impatient push
last me/it --yes`
"""

from __future__ import annotations

import runpy
import time
from types import SimpleNamespace

from huggingface_hub.utils import _http

from engine.extras.handover import hub
from engine.launch.process import ENTRY_FILE

if __name__ == "__main__":
    hub.ANSWER_SECONDS, hub.COMMIT_SECONDS, hub.SENDING_SECONDS = 1.0, 2.0, 30.0
    vars(_http)["time"] = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    runpy.run_path(str(ENTRY_FILE), run_name="__main__")
