"""Looks like trackio's command line: get metric --project P --run R --metric M --json."""

import json
import sys

from trackio import database

words = sys.argv[1:]
project, run, metric = (words[words.index(option) + 1] for option in ("--project", "--run", "--metric"))
assert words[:2] == ["get", "metric"] and words[-1] == "--json"
path = database(project)
rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
found = [row for row in rows if row["run"] == run and metric in row["metrics"]]
if not found:
    sys.exit(f"Error: Run '{run}' not found in project '{project}'.")
values = [{"step": row["step"], "value": row["metrics"][metric]} for row in found]
print(json.dumps({"project": project, "run": run, "metric": metric, "values": values}))  # noqa: T201
