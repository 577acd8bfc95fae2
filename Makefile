# make run        a demo batch with a real small model, from nothing
# make test       the whole test suite           make lint      ruff and mypy
# make test-gpu   the tests that need CUDA       make bench     the tables of results/
# make clean      forget environments and built files (not models/ and runs/)

PYTHON ?= python3
VENV ?= .venv
MODEL ?= models/smollm2-135m-instruct
INPUT ?= configs/runs/demo.jsonl
NOW := $(shell date +%Y%m%d-%H%M%S)
RUN ?= runs/demo-$(NOW)
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint configs/constraints.txt

.PHONY: run test test-gpu lint bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed $(MODEL)/config.json
	@mkdir -p $(RUN)
	$(BIN)/hpcgen run --model $(MODEL) --input $(INPUT) --output $(RUN)/results.jsonl --run-dir $(RUN)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -rs $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# With the interpreter of the machine where that has a torch with CUDA, as on most GPU systems.
test-gpu:
	@if $(PYTHON) -c 'import greenlet, h5py, msgspec, pytest, torch, transformers; assert torch.cuda.is_available()' 2>/dev/null; then \
	  PYTHONPATH=. $(PYTHON) -m pytest tests/gpu -rs; \
	else $(MAKE) --no-print-directory $(VENV)/.installed-dev && $(BIN)/python -m pytest tests/gpu -rs; fi

bench: $(VENV)/.installed-dev $(MODEL)/config.json
	@for script in results/*.py; do [ -e "$$script" ] || continue; echo "$$script"; $(BIN)/python "$$script" --model $(MODEL) || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "hpcgen needs Python 3.10 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml configs/constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml configs/constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[demo,mpi,dev]'
	@touch $@ $(VENV)/.installed

# config.json keeps the time of its making: a newer script or environment does not make the model again.
$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/python configs/runs/demo_model.py $(MODEL)
