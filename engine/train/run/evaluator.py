"""Evaluations during a run: scores the validation set, saves and marks the best, and decides on early stopping."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.batching.budget import MicroBatchBudget
from engine.budget.predict.inference import GENERATION_ROWS, generates
from engine.config.schema.recipe import Generate
from engine.evaluate.answers import answer_prompts, load_fixed_prompts, planned_rows, settings_for
from engine.evaluate.context import EvaluationContext, EvaluationStopped, FailedPass
from engine.evaluate.generation import within_positions
from engine.evaluate.scores import evaluate as score
from engine.train.run.checkpoints import CheckpointManager
from engine.train.run.expert_utilisation import ExpertMonitor
from engine.train.run.run_context import RunContext
from engine.train.run.run_state import Best, RunState, is_better
from engine.train.run.training_setup import TrainingSetup
from engine.train.step.failures import RankOom, RecoveredOom


class Evaluator:
    """Rank 0 scores while the other ranks wait, or run what it requests."""

    def __init__(
        self,
        setup: TrainingSetup,
        state: RunState,
        run: RunContext,
        checkpoints: CheckpointManager,
        experts: ExpertMonitor,
    ) -> None:
        self._setup, self._state, self._checkpoints, self._directory = setup, state, checkpoints, run.directory
        self._experts = experts
        self._journal, self._requests, self._watchdog = run.journal, run.requests, run.watchdog
        self._ranks, self._asked = setup.context.ranks, setup.spec.recipe.eval
        alone, validation, strategy = self._make_context(), setup.prepared.validation, setup.context.strategy
        self._context = alone if validation is None else strategy.join_evaluation(alone, validation)
        self._prompts = load_fixed_prompts(setup.spec, setup.context.loaded)
        if self._prompts is not None:
            settings = settings_for(self._prompts, alone.loaded, alone.generate)
            asked = replace(alone, generate=settings)
            self._prompts_context = strategy.join_evaluation(asked, self._prompts, "prompts: ")

    @property
    def has_validation(self) -> bool:
        return self._setup.prepared.validation is not None

    @property
    def out_of_patience(self) -> bool:
        """Early stopping: whether the best metric has not improved for as many evaluations as the recipe allows."""
        patience = self._asked.early_stopping_patience
        return patience is not None and self._state.best.since >= patience

    def evaluate(self) -> bool:
        """Score the validation set, write the use of experts since the last evaluation (`experts/`), and save a
        checkpoint if it is the best. False without a validation set, or if the run was asked to end meanwhile."""
        metrics = self._ranks.run_on_rank0(self._score)
        if metrics is None:
            return False
        self._state.last_evaluated = self._state.step
        # Before a checkpoint is saved: one saved now must not count these steps again.
        self._experts.after_evaluation(self._state.step, writes=self._ranks.is_rank0)
        if self._state.step:
            self._compare_with_best(metrics)
        self._journal.phase("training")
        return True

    def _score(self) -> dict[str, float] | None:
        """Write the event `eval`; None without a validation set, or if the run was asked to end meanwhile."""
        validation, asked = self._setup.prepared.validation, self._asked
        if validation is None:
            return None
        self._journal.phase("evaluating")
        began = time.perf_counter()
        try:
            with self._watchdog.over("evaluation", f"the evaluation after step {self._state.step}"):
                scores = score(
                    self._context, validation, asked.metrics,
                    limit=asked.limit, samples=asked.samples, by_source=bool(self._setup.spec.recipe.data.validation),
                )  # fmt: skip
                own = answer_prompts(self._prompts_context, self._prompts) if self._prompts is not None else []
        except EvaluationStopped:
            return None
        self._journal.write(
            "eval",
            step=self._state.step,
            metrics=scores.metrics,
            samples=[*own, *scores.samples],
            count=scores.count,
            seconds=round(time.perf_counter() - began, 3),
        )
        return scores.metrics

    def _compare_with_best(self, metrics: dict[str, float]) -> None:
        best, name = self._state.best, self._setup.spec.recipe.checkpoint.best_metric
        value = metrics.get(name)
        if value is None:
            return
        keep = self._setup.spec.recipe.checkpoint.keep_best
        is_kept = keep > 1 and self._state.rank(value, name, keep)
        if not is_better(value, best.value, name, self._asked.early_stopping_threshold):
            best.since += 1
            if is_kept and not self._checkpoints.save_if_possible(f"one of the {keep} best by {name}"):
                del self._state.scored[str(self._state.step)]
            return
        self._state.best = Best(self._state.step, value)
        if not self._checkpoints.save_if_possible(f"best {name}"):
            self._state.best = best
            self._state.scored.pop(str(self._state.step), None)
        elif self._ranks.is_rank0:
            self._checkpoints.mark_best(name, value)

    def _make_context(self) -> EvaluationContext:
        step = self._setup.context
        return EvaluationContext(
            device=step.device,
            loaded=step.loaded,
            loss=step.loss,
            cost=step.strategy.evaluation_cost(step.cost),
            budget=MicroBatchBudget(step.budget.budget_bytes, step.budget.top_bytes),
            generate=self._generate_settings(),
            report=self._failed,
            should_stop=self._interrupted,
            planned_rows=self._planned_rows(),
            preference=self._setup.spec.recipe.preference if step.objective is not None else None,
            references=step.references,
        )

    def _planned_rows(self) -> Callable[[int], int]:
        """Predicts how many answers fit by their prompts' tokens; with sharded weights always GENERATION_ROWS."""
        step = self._setup.context
        if step.strategy.voted_group is not None:
            return lambda prompt: GENERATION_ROWS
        return planned_rows(self._setup.spec, step.device)

    def _generate_settings(self) -> Generate:
        """Lowers max_new_tokens, with a warning, if so many do not fit behind the longest prompt."""
        recipe, validation = self._setup.spec.recipe, self._setup.prepared.validation
        if validation is None or not generates(recipe):
            return recipe.generate
        settings, note = within_positions(recipe.generate, self._setup.context.loaded.config.to_dict(), validation)
        if note:
            self._journal.warn("short_answers", note)
        return settings

    def _failed(self, failed: FailedPass, remedy: str, before: Any, after: Any) -> None:
        oom = RankOom(failed.failure, failed.rank)
        self._setup.context.report(RecoveredOom(self._state.step, oom, remedy, 1, before=before, after=after))

    def _interrupted(self) -> bool:
        """Whether the run was asked to end; also tells the watchdog that the evaluation makes progress."""
        self._watchdog.goes_on()
        return self._requests.poll()
