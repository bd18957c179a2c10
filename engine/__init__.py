"""The headless engine: everything a run needs, from its configuration to its result."""
