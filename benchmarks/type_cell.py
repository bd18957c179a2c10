"""Tries one model type: whether the gate lets it in, its plans, LoRA and full fine-tuning, back-off, packing, resume,
and its results opened without the engine.

Called by `benchmarks.model_types`, in a process for each type.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.family_cell import Problem, error_of, finished, planned
from benchmarks.type_configs import tiny_config
from engine.budget.predict.simulated import keep_simulation
from engine.checks.run import problems_of_run
from engine.config.load import dump_run_spec
from engine.config.schema.run import RunSpec
from engine.data.batch import Batch
from engine.data.tokens import IGNORED
from engine.errors import TunedeckError, UsageError
from engine.extras.handover.merge import merge
from engine.journal.directory import RunDirectory
from engine.model.config import auto_class, silence_libraries
from engine.model.decoder import eval_mode
from engine.model.loaded import LoadedModel
from engine.model.loss import make_loss
from engine.model.tokenizer import byte_tokenizer
from engine.model.verify import require_separation
from engine.train.step.transaction import StepTransaction
from tests.model.samples import batch_of, cpu, logits_of, name_base
from tests.train.run_helpers import Workshop, make_spec, of_kind, train, write_samples

METHODS = ("lora", "full")
STEPS, ROWS = 2, 4
LONGEST = 44
"""Bytes of a prompt and its answer, at most: each has up to half."""
LOSSES_EQUAL, LOGITS_EQUAL = 1e-4, 1e-4
"""Largest relative difference of losses, and largest difference of logits as a share of the largest one."""
PLAN_EQUAL = 0.02
"""Largest relative difference between the predicted and the measured peak of a plan that counts as right."""

Cell = dict[str, Any]
"""What a column of the table says: figures, {"refused": sentence} or {"failed": sentence}."""


def spec_of(model: Path, method: str, samples: Path, *, device: str = "metered", **tables: Any) -> RunSpec:
    """The run spec of STEPS steps in fp32 of the model in the folder `model`, trained with `method` ("lora" or "full")
    on the file `samples`; `tables` of the recipe are laid over it. LoRA recomputes activations, which is the default;
    full fine-tuning keeps them."""
    rate = {
        "max_steps": STEPS, "batch_size": ROWS, "micro_batch": ROWS, "gradient_checkpointing": method == "lora",
        "warmup_steps": 0, "scheduler": "constant", **tables.pop("train", {}),
    }  # fmt: skip
    named = {"id": str(model), "init": "pretrained"}
    options: Any = {"device": device, "model": named, "method": {"kind": method}, "train": rate}
    return make_spec(samples, **options, **tables)


def refusal(
    config: Mapping[str, Any], folder: Path, samples: Path, *, method: str = "lora", packing: bool = False
) -> str | None:
    """The first problem that `recipes check`, `plan` and `train` report for a model with this config and a method,
    before a run folder exists; None if they accept it. `folder` is written to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    named = {"id": str(folder), "init": "random", "tokenizer": "builtin:bytes"}
    said = problems_of_run(make_spec(samples, model=named, method={"kind": method}, data={"packing": packing}))
    return said[0].replace(str(folder), "the model") if said else None


def write_tiny(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a model with random weights in the class that its hub folder would name, and the byte tokenizer. Weights
    that the class begins at zero are drawn, too: gates that let nothing through would hide mistakes."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() and (not parameter.isfinite().all() or not parameter.any()):
                    parameter.normal_(std=0.05)
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Trial:
    """The cells of one model type, in a folder of its own. Those in `cells` are there already; `keep` is called with
    all after each new one. `given`: a config in place of `tiny_config`'s."""

    def __init__(
        self,
        model_type: str,
        folder: Path,
        cells: Mapping[str, Cell],
        keep: Callable[[Mapping[str, Cell]], None],
        given: PreTrainedConfig | None = None,
    ) -> None:
        self.model_type, self.folder, self._keep, self._given = model_type, folder, keep, given
        self.cells = {name: cell for name, cell in cells.items() if "failed" not in cell}
        self.samples = write_samples(folder / "samples.jsonl", count=STEPS * ROWS, longest=LONGEST)
        self.loaded: dict[str, LoadedModel] = {}
        self.whole: RunDirectory | None = None

    def run(self, *, measure: bool) -> dict[str, Cell]:
        """Try what has no cell yet; a cell that fails does not end the others, unless they need what it makes. Runs
        are made beside their plans only with `measure`."""
        silence_libraries()
        warnings.filterwarnings("ignore")
        if not self._admitted():
            return self.cells
        steps: dict[str, Callable[[], Cell | None]] = {
            "lora": lambda: self._trained("lora"), "full": lambda: self._trained("full"), "merged": self._merged,
            "split": self._split, "packing": self._packing,
        }  # fmt: skip
        runs: dict[str, Callable[[], Cell | None]] = {
            "plan, LoRA": lambda: self._planned("lora"), "plan, full": lambda: self._planned("full"),
            "resume": self._resumed,
        }  # fmt: skip
        if any(name not in self.cells for name in steps):
            for name, attempt in steps.items():
                if "refused" not in self.cells.get(name, {}):
                    self._try(name, attempt)
        if measure and {"lora", "full"} <= {name for name, cell in self.cells.items() if "failed" not in cell}:
            for name, attempt in runs.items():
                if name not in self.cells:
                    self._try(name, attempt)
        return self.cells

    def _admitted(self) -> bool:
        """Ask the gate, and write a tiny model of what it lets in; False if there is none."""
        try:
            self.config = self._given or tiny_config(self.model_type)
        except Exception as error:  # noqa: BLE001  (any class of transformers runs here)
            refused = refusal({"model_type": self.model_type}, self.folder / "config", self.samples)
            self._set("gate", {"refused": refused} if refused else {"failed": f"no tiny config: {_said(error)}"})
            return False
        said = [refusal(self.config.to_dict(), self.folder / "config", self.samples, method=each) for each in METHODS]
        refused, in_full = said
        if refused is not None and in_full is not None:
            self._set("gate", {"refused": refused})
            return False
        try:
            self.model = write_tiny(self.config, self.folder / "model")
        except Exception as error:  # noqa: BLE001  (likewise)
            self._set("gate", {"failed": f"no tiny model: {_said(error)}"})
            return False
        self._set("gate", {"class": load_class(self.model)})
        for method, sentence in zip(METHODS, said, strict=True):
            if sentence is not None:
                self._set(method, {"refused": sentence})
        return True

    def _set(self, name: str, cell: Cell) -> None:
        self.cells[name] = cell
        self._keep(self.cells)

    def _try(self, name: str, attempt: Callable[[], Cell | None]) -> None:
        try:
            cell = attempt()
        except (Problem, TunedeckError) as error:
            cell = {"failed": _said(error)}
        except Exception as error:  # noqa: BLE001  (a defect of the engine becomes a cell of the table)
            cell = {"failed": f"{type(error).__name__}: {_said(error)}"}
        if cell is not None:
            self._set(name, cell)

    def _trained(self, method: str) -> Cell:
        """Take STEPS steps as a run does, save the result, and open it without the engine in the base's class: losses,
        and the largest difference of logits as a share of the largest logit."""
        spec = spec_of(self.model, method, self.samples, device="cpu")
        keep_simulation(spec, {"problem": "not asked for"})  # plans are compared with runs, below
        with Workshop(spec, self.folder / method) as setup:
            steps = [StepTransaction(setup.context).run(step, setup.order.step(step)) for step in range(1, STEPS + 1)]
            loaded = setup.context.loaded
        result = self.folder / f"{method}-result"
        loaded.save(result)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys.*")
            alone: torch.nn.Module = (
                PeftModel.from_pretrained(opened(self.model), result) if method == "lora" else opened(result)
            )
        if method == "full":
            self._require_all_weights(alone)
            self._try("values", lambda: _require_values(alone, result))
        self.loaded[method] = loaded
        return {"losses": [step.loss for step in steps], "logit_difference": self._difference(alone, loaded.model)}

    def _merged(self) -> Cell | None:
        """The adapter merged by the engine and opened by transformers alone: likewise."""
        if "lora" not in self.loaded:
            return None
        folder, adapter = self.folder / "merged", self.folder / "lora-result"
        name_base(adapter, self.model)
        if self.loaded["lora"].coverage.shared:
            with suppress(UsageError):
                merge(adapter, folder, lambda text: None)
                raise Problem("adapters on layers that share a weight were merged")
            return {"refused": "layers share a weight"}
        merge(adapter, folder, lambda text: None)
        alone = opened(folder)
        self._require_all_weights(alone)
        return {"logit_difference": self._difference(alone, self.loaded["lora"].model)}

    def _split(self) -> Cell | None:
        """The loss of a padded micro-batch beside those of its rows alone: nothing may depend on how a step is cut."""
        if not self.loaded:
            return None
        options: Any = {"implementation": "chunked", "label_smoothing": 0.0, "chunk_tokens": None, "device": cpu()}
        loaded, batch = next(iter(self.loaded.values())), batch_of()
        loss = make_loss(loaded, **options)
        with eval_mode(loaded.model):
            together = float(loss(batch))
            alone = sum(float(loss(_row(batch, number))) for number in range(len(batch.input_ids_BS)))
        difference = abs(alone / together - 1)
        if not difference <= LOSSES_EQUAL:
            raise Problem(f"the loss of rows alone differs by {difference:.1e} from that of the micro-batch")
        return {"loss_difference": difference}

    def _packing(self) -> Cell | None:
        if not self.loaded:
            return None
        method = next(iter(self.loaded))
        refused = refusal(self.config.to_dict(), self.folder / "config", self.samples, method=method, packing=True)
        if refused is not None:
            return {"refused": refused}
        try:
            require_separation(self.loaded[method])
        except TunedeckError as error:
            return {"refused": _said(error)}
        return {"apart": True}

    def _planned(self, method: str) -> Cell | None:
        """The predicted peak of a run beside the measured one."""
        if "refused" in self.cells[method]:
            return None
        spec = spec_of(self.model, method, self.samples)
        plan = planned(spec)
        place, events = finished(spec, self.folder / f"{method}-run")
        if method == "lora":
            self.whole = place
        measured = events[-1]["measured"]
        if "predicted" not in measured:
            raise Problem("the run had no plan")
        error = measured["predicted"]["peak_bytes"] / measured["peak_bytes"] - 1
        return {"by": plan.predictor, "peak_bytes": measured["peak_bytes"], "peak_error": error}

    def _resumed(self) -> Cell | None:
        """One step of LoRA and a second one after a resume, beside both without."""
        if self.whole is None:
            return None
        first = spec_of(self.model, "lora", self.samples, train={"max_steps": STEPS - 1})
        place, _ = finished(first, self.folder / "legs")
        place.run_toml.write_text(dump_run_spec(spec_of(self.model, "lora", self.samples)))
        code, events = train(place, resume=True)
        if code != 0 or not of_kind(events, "resumed"):
            raise Problem(f"the resumed run ended with exit code {code}: {error_of(events)}")
        one, other = (load_file(each.adapter / "adapter_model.safetensors") for each in (self.whole, place))
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            raise Problem("the resumed run's adapter differs from that of the run without interruption")
        return {"equal": True}

    def _difference(self, alone: torch.nn.Module, mine: torch.nn.Module) -> float:
        """Raises Problem if the logits of two models differ, or if training has changed none."""
        batch = batch_of()
        before, ours, theirs = (logits_of(model, batch) for model in (opened(self.model), mine, alone))
        if torch.equal(before, ours):
            raise Problem("training has changed no logit")
        difference = float((ours - theirs).abs().max()) / float(ours.abs().max())
        if not difference <= LOGITS_EQUAL:
            raise Problem(f"the logits of the opened result differ by {difference:.1e}")
        return difference

    def _require_all_weights(self, alone: torch.nn.Module) -> None:
        """Raise Problem if a result has another class or other tensors than its base."""
        base = opened(self.model)
        if type(alone) is not type(base):
            raise Problem(f"the result is a {type(alone).__name__}, its base a {type(base).__name__}")
        theirs, ours = base.state_dict(), alone.state_dict()
        if theirs.keys() != ours.keys():
            raise Problem(f"{len(theirs.keys() ^ ours.keys())} tensors of the base or of the result are missing")


def _require_values(alone: torch.nn.Module, folder: Path) -> Cell | None:
    """Raise Problem if transformers opens a weight with other values than `folder` has; else there is no cell."""
    saved = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights = alone.state_dict()
    changed = sorted(name for name in saved.keys() & weights.keys() if not torch.equal(saved[name], weights[name]))
    if changed:
        rows = (saved[changed[0]] != weights[changed[0]]).reshape(len(saved[changed[0]]), -1).any(1).nonzero()
        raise Problem(f"transformers opens {changed[0]} with other values than the file has, in row {int(rows[0])}")
    return None


def _row(batch: Batch, number: int) -> Batch:
    """One row of a padded batch, without its padding."""
    assert batch.attention_mask_BS is not None
    tokens = int(batch.attention_mask_BS[number].sum())
    ids_BS, labels_BS = batch.input_ids_BS[number : number + 1, :tokens], batch.labels_BS[number : number + 1, :tokens]
    return Batch(ids_BS, labels_BS, None, None, (number,), int((labels_BS[:, 1:] != IGNORED).sum()))


def opened(folder: Path) -> torch.nn.Module:
    """A model as anybody opens it: with transformers, in the class that its config.json names."""
    config = _config(folder)
    model: torch.nn.Module = auto_class(config).from_pretrained(folder, dtype=torch.float32)
    return model


def load_class(folder: Path) -> str:
    """The class that a model folder's config.json names."""
    return str((_config(folder).architectures or ["?"])[0])


def _config(folder: Path) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    return config


def _said(error: Exception) -> str:
    if isinstance(error, TunedeckError):
        return "; ".join(text for text in (error.found, error.fix) if text)
    return " ".join(str(error).split())[:300] or type(error).__name__


def cells_of(
    model_type: str,
    folder: Path,
    cells: Mapping[str, Cell] | None = None,
    keep: Callable[[Mapping[str, Cell]], None] = lambda cells: None,
    *,
    measure: bool = True,
    given: PreTrainedConfig | None = None,
) -> dict[str, Cell]:
    """The cells of a type; see `Trial`."""
    folder.mkdir(parents=True, exist_ok=True)
    return Trial(model_type, folder, cells or {}, keep, given).run(measure=measure)
