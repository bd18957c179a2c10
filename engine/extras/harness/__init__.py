"""Public tasks: evaluations by lm-evaluation-harness, whose task files run in a separate process."""
