"""What happens after an allocation failure: the memory settings change, and the step is repeated.

An OOM is described by four records, one after another. `catch_oom` (engine/device/catch_oom.py) turns the exception
into an `OutOfMemory` (engine/device/oom.py): what ran out, and what the device held. The step transaction
(engine/train/step/transaction.py) lets all ranks exchange it as a `RankOom` (records.py), with the rank, its
micro-batch and its capacity, by `gather_failures` (consensus.py). The rank with the smallest failed micro-batch chooses
a remedy on the ladder (ladder.py), which is a change of the `MemorySettings` (memory_settings.py); the other ranks
adopt them. What was done is a `RecoveredOom` (records.py). Rank 0 writes it as the event `backoff` and as a report
(oom_report.py), which the command line and the console show (engine/journal/event_text.py, engine/journal/oom_page.py).
A remedy that stays on is kept as an `ActiveRemedy` (records.py) until the memory is available again and `BudgetGrowth`
(budget_growth.py) lifts it.
"""
