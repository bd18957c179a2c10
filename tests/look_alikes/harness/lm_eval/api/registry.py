"""Names of metrics."""

metric_registry: dict[str, object] = {}
