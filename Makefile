# The one environment of every command: made when missing, renewed when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest

# Modules are compiled once for all processes of the tests, also where that is forbidden, out of the way in a folder of
# their own: without, each child that imports PyTorch and this package computes for twice as long.
test test-long gpu test-versions test-oldest: export PYTHONPYCACHEPREFIX := $(CURDIR)/build/bytecode
test test-long gpu test-versions test-oldest: export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-long gpu test-versions test-oldest lint format notebooks docs bench bench-all clean

help:
	@echo "make demo    train two networks inside byte budgets, and compare with plain PyTorch"
	@echo "make test    run the test suite"
	@echo "make test-long  run more cases of the same: random programs, networks, notebooks"
	@echo "make gpu     run what needs a CUDA device, checkmate selftest with it; make test runs it on a simulated one"
	@echo "make test-versions  run a selection of them on each version of PyTorch that is supported; about an hour"
	@echo "make test-oldest  run a part of it on the oldest of these"
	@echo "make lint    check style and types"
	@echo "make format  put the code in its layout"
	@echo "make notebooks  run the notebooks anew, for what is committed with them"
	@echo "make docs    make the pages of docs/ and of all docstrings, in build/docs"
	@echo "make bench   compare with other ways to save memory: rows, tables, pictures; about two and a half hours"
	@echo "make bench-all  make every row of README and of the docs anew, of what is committed; a day"
	@echo "make clean   remove the environment and everything generated"

demo: $(STAMP)
	$(BIN)/python -m checkmate demo

test: $(STAMP)
	$(TESTS) -n $(JOBS) --dist worksteal $(ARGS)

test-long: $(STAMP)
	$(TESTS) -n $(JOBS) --dist worksteal -m long $(ARGS)

gpu: $(STAMP)
	$(TESTS) -m cuda $(ARGS)

test-versions: $(STAMP)
	$(BIN)/nox -s versions -- --jobs $(JOBS)

test-oldest: $(STAMP)
	$(BIN)/nox -s "versions(torch='2.11.0')" -- --quick --jobs $(JOBS) --out /dev/null

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/run.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.peers.resident
	$(BIN)/python -m benchmarks.peers --report
	$(BIN)/python -m benchmarks.pages

bench-all: $(STAMP)
	for each in step arena loss hard_limit start ways tight solve solve.stages \
		solve.picture largest_batch whole_steps second_memory second_memory.measured \
		second_memory.in_file homes homes.measured fits sharded estimates orders \
		gpu_graphs higher_order kernels; do \
		$(BIN)/python -m benchmarks.$$each || exit 1; done
	$(MAKE) bench

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist docs/made *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
