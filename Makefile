# `make demo` and `make test` set everything up on a machine with Python 3.11.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STACK ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
NPROC ?= 2
TEST_WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile

GPU_CSV ?= docs/benchmarks/gpu_lookup.csv
SHA ?= $(shell git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null)

.PHONY: help install demo test test-long test-newest gpu-check check bench docs clean

help:
	@echo "make install     environment in $(VENV) (STACK=$(STACK); cpu, cuda or newest)"
	@echo "make demo        train a DLRM with TT tables on MovieLens-100K, beside its dense twin"
	@echo "make test        the test suite, under 15 minutes on 2 cores"
	@echo "make test-long   the longer proofs too"
	@echo "make test-newest the test suite on the newest torch and torchrec, in .venv-newest"
	@echo "make gpu-check   device tests and lookup benchmark on a GPU; needs only torch, triton, pytest"
	@echo "make check       ruff, ruff format, mypy on the installed package"
	@echo "make bench       CPU lookup benchmark and model quality over seeds, CSVs in docs/benchmarks"
	@echo "make docs        HTML documentation in docs/_build/html"

install: $(VENV)/.installed-$(STACK)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else \
		f"Python 3.11 or newer is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

# --no-deps: the file is the whole environment (requirements/cpu.txt says why).
$(VENV)/.installed-cpu: $(VENV)/bin/python requirements/cpu.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/cpu.txt
	@$(BIN)/python -c "import torch" || { echo "requirements/cpu.txt needs the CPU build of torch: \
		let pip find it in PyTorch's own CPU index, by PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-cuda: $(VENV)/bin/python requirements/cuda.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --requirement requirements/cuda.txt
	$(BIN)/python -m pip install --quiet --no-deps $(shell grep recbole requirements/cpu.txt)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(VENV)/.installed-newest: $(VENV)/.installed-cpu requirements/newest.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/newest.txt
	touch $@

$(VENV)/.installed-dev: install requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/dev.txt
	touch $@

demo: install
	$(BIN)/ecorec train --config movielens_100k --nproc $(NPROC) --compare-dense

test: install
	$(PYTEST) -m "not long"

test-long: install
	$(PYTEST)

test-newest:
	$(MAKE) test STACK=newest VENV=.venv-newest

# No install: a bare machine with a GPU will do.
gpu-check:
	$(PYTHON) tests/gpu_check.py --csv $(GPU_CSV) --sha "$(SHA)"

# mypy cannot follow the editable install's import hook: it checks a plain copy.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy -p ecorec_torchrec
	rm -rf build

bench: install
	$(BIN)/ecorec bench cpu-lookup --csv docs/benchmarks/cpu_lookup.csv
	$(BIN)/ecorec bench quality --seeds 8 --csv docs/benchmarks/movielens_quality.csv

docs: install
	$(BIN)/python -m pip install --quiet --requirement requirements/docs.txt
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache
