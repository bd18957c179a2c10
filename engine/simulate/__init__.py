"""One optimizer step of the engine, simulated on tensors without memory. `plan --exact` uses it."""
