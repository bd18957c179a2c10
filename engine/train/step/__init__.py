"""One optimizer step as a transaction, with the recovery from out-of-memory errors.

An OOM is described by four records, one after another. `catch_oom` (engine/device/oom.py) turns the exception into an
`OutOfMemory`: what ran out, and what the device held. The step transaction (transaction.py) lets all ranks exchange it
as a `RankOom` (failures.py), with the rank, its micro-batch and its capacity. The rank with the smallest failed
micro-batch chooses a remedy on the ladder (ladder.py), which is a change of the `MemorySettings`; the other ranks adopt
them. What was done is a `RecoveredOom` (failures.py). Rank 0 writes it as the event `backoff` and as a report
(oom_report.py), which the command line and the console show (engine/journal/event_text.py and
oom_text.py). A remedy that stays on is kept as an `ActiveRemedy` (failures.py) until memory is available again and
`BudgetGrowth` (budget_growth.py) lifts it.
"""
