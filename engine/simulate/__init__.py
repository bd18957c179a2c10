"""The engine's own step over tensors that have shapes and no memory: what `plan --exact` and the budget's judge use."""
