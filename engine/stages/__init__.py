"""Runs of several stages: the conductor, a process without torch that starts one stage's engine after another.

Each stage is an ordinary run in a directory of its own, `RUN/stages/01-NAME`, and an engine process of its own, so no
memory of one stage can reach the next. Which recipe a stage trains with is in `engine.spec.stages`, its part of the
run's journal in `engine.journal.stages`, its plan in `engine.budget.advise.staged_plan`.

Try: `tunedeck train -p demo -r RECIPE` with a recipe that has [[stages]].
"""
