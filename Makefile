# make demo    a small model learns on a simulated device, without a GPU or a network: on a terminal in the console,
#              ready to be started, else headless
# make check   lint, types, import contracts and the fast tests
# make test    the same with the slow tests too, and of each test's slow cases one in four, always the same ones
# make all-tests  the same with every case: an hour of processor time; make test takes three quarters of it
# make durations  all tests; which files make check leaves out is written anew, from what they took (tests/slow.json)
# make torture every single allocation fails once, engines are killed anywhere, writes are cut, files by strangers are
#              fuzzed: many hours on two cores; ends with a table of what was done, how often, and what was lost.
#              TIMES=2 does each of these twice instead, and INPUTS=10000 takes fewer files: the same table, sooner
# make matrix  the fast tests with the oldest and the newest torch and transformers that pyproject.toml accepts
# make plans   the VRAM budget of every shipped profile and recipe with a dozen models, in one table
# make site    the documentation as a site, in build/site; make pages writes the pages that are made from the code
# All make .venv and install what they need first. PYTHON=python3.12 picks another interpreter (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

# Which slow cases make test runs: tests/conftest.py.
.PHONY: demo check test all-tests sampled-tests every-case durations torture plans matrix oldest-pair newest-pair site pages lint clean

demo: $(READY)
	@if test -t 0 && test -t 1 && test -t 2; then exec $(BIN)/tunedeck -p demo -r demo; \
	else exec $(BIN)/tunedeck train -p demo -r demo; fi

# Hundreds of engines are started: each would compile what Python may not write down.
# Three workers for two cores: tests wait for the processes that they start for about a quarter of their time.
WORKERS ?= 3
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -P -m pytest \
	-n $(WORKERS) --dist loadgroup --no-loadscope-reorder -o console_output_style=count

check: $(READY)
	@echo "make check: lint, types, import contracts and the fast tests. make test adds the slow ones."
	@$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not torture and not slow"

# mypy has one core's work for a minute: beside it the tests begin.
test: $(READY)
	@echo "make test: three quarters of an hour of processor time. make check: about three minutes, the fast tests alone."
	@$(MAKE) --no-print-directory -j2 lint sampled-tests

all-tests: $(READY)
	@$(MAKE) --no-print-directory -j2 lint every-case

sampled-tests: SAMPLE := --sample
sampled-tests every-case: $(READY)
	$(PYTEST) $(SAMPLE)

durations: $(READY)
	$(PYTEST) --durations-file

# A part that fails does not keep the others from their turn; the table says so and fails.
ROWS := build/torture.jsonl
TORTURE := -TUNEDECK_TORTURE=$(ROWS) OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -P -m
torture: $(READY)
	@mkdir -p build && rm -f $(ROWS)
	$(TORTURE) tests.train.torture $(TIMES:%=--sample %)
	$(TORTURE) tests.stages.kill_anywhere --moments $(or $(TIMES),30)
	$(if $(TIMES),,$(TORTURE) pytest -m torture -s)
	$(TORTURE) tests.faults.every_write $(if $(TIMES),--sample $(TIMES),--call-sites)
	$(TORTURE) tests.fuzz.run --inputs $(or $(INPUTS),100000)
	$(TORTURE) tests.hours.run $(if $(TIMES),--share 0.1)
	$(BIN)/python -P -m tests.torture_table $(ROWS)

# Other packages are those of the suite, without what belongs to one version of the two.
PAIRED := torch|transformers|tokenizers|triton|huggingface_hub|hf-xet|peft|trl|accelerate
OLDEST := $(shell sed -nE 's/^    "(torch|transformers)>=([0-9.]+),.*/\1==\2.*/p' pyproject.toml)
NEWEST := $(shell sed -nE 's/^    "(torch|transformers)>=[^,]*,([^"]*)".*/\1\2/p' pyproject.toml)
matrix: oldest-pair newest-pair

oldest-pair: PAIR := $(OLDEST)
newest-pair: PAIR := $(NEWEST)
oldest-pair newest-pair:
	@mkdir -p build && grep -vE '^($(PAIRED))==' constraints.txt > build/constraints-$@.txt
	$(PYTHON) -m venv build/$@
	build/$@/bin/pip install --quiet --disable-pip-version-check $(foreach each,$(PAIR),'$(each)')
	build/$@/bin/pip install --quiet --disable-pip-version-check -c build/constraints-$@.txt -e '.[dev]' $(foreach each,$(PAIR),'$(each)')
	@build/$@/bin/python -c 'import torch, transformers; print(f"torch {torch.__version__}, transformers {transformers.__version__}")'
	$(subst $(BIN),build/$@/bin,$(PYTEST)) -m "not torture and not slow"

plans: $(READY)
	$(BIN)/python -m benchmarks.plans

site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pages: $(READY)
	$(BIN)/python -m benchmarks.reference_pages

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

# pip installs torch, first and alone: pip's settings may name a smaller build, which a resolver of everything would miss.
# uv, from PATH or installed here, installs the rest, in a fifth of pip's time. It does not read pip's settings, so these
# are passed to it. If uv is not available or fails, pip installs the rest.
TORCH := $(shell grep '^torch==' constraints.txt)
UV := $(shell command -v uv)
PIP := $(BIN)/pip --disable-pip-version-check
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tunedeck needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@echo "Installing Tunedeck and its tools into .venv, once: $(TORCH) (0.2 GB for CPU, several GB with CUDA), then about 120 packages"
	@$(PYTHON) -m venv .venv
	@echo "1 of 2: $(TORCH)"
	$(PIP) install -c constraints.txt $(TORCH)
	@echo "2 of 2: everything else"
	@$(if $(UV),true,$(PIP) install --quiet uv) || echo "uv: not available; pip installs the rest, which takes longer"
	@setting() { $(PIP) config list | sed -nE "s/^[^=]*[.]$$1='(.*)'$$/\1/p" | head -n 1; }; \
	hand() { test -z "$$2" || export "$$1=$$2"; }; \
	hand UV_DEFAULT_INDEX "$${UV_DEFAULT_INDEX:-$$(setting index-url)}"; \
	hand UV_EXTRA_INDEX_URL "$${UV_EXTRA_INDEX_URL:-$$(setting extra-index-url)}"; \
	hand UV_FIND_LINKS "$${UV_FIND_LINKS:-$$(setting find-links | tr ' ' ,)}"; \
	export VIRTUAL_ENV="$$PWD/.venv" UV_INDEX_STRATEGY=unsafe-best-match UV_COMPILE_BYTECODE=1; \
	$(or $(UV),$(BIN)/uv) pip install -c constraints.txt -e '.[dev]' || $(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
