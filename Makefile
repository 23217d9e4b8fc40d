# Everything runs in a virtual environment of its own, made on first use from pinned versions.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench notebooks bench-local api clean

demo: $(VENV)/.base  ## the main job: capture, measure, search, train on this machine
	$(BIN)/autopar demo

test: $(VENV)/.dev  ## the test suite, under ten minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## the scripts that print the numbers of the README; half an hour on an idle machine
	for script in $(filter-out %/bench_local.py,$(wildcard tests/benchmarks/bench_*.py)); do \
	  echo "== $$script"; PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; \
	done

api: $(VENV)/.dev  ## the API reference, into the folder api
	PYTHONPATH=. $(BIN)/python docs/api.py api

$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (a minute or two, once) ..."
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "Installing test and lint tools into $(VENV) ..."
	$(PIP) -e '.[dev,hf]'
	touch $@

notebooks: $(VENV)/.dev  ## runs the notebooks again and keeps their outputs
	OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace notebooks/*.ipynb

bench-local: $(VENV)/.dev  ## predicted against measured steps of some hundred plans; kept in bench-local/, can be cut short
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_local.py --output bench-local

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
