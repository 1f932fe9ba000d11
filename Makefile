# `make demo` and `make test` are all a newcomer needs; both install what they need first.
PYTHON ?= python3
BIN := .venv/bin
N ?= 200

.PHONY: demo test setup lint bench crash measure docs

demo: .venv/.trains
	$(BIN)/hotlap demo

test: setup
# The tests start thousands of interpreters, which need not compile the same files again.
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder

setup: .venv/.installed

# The demo needs less than the tests do, and a newcomer waits for it.
.venv/.trains: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hotlap needs Python 3.11 or newer; run: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@echo 'Installing torch and what hotlap needs into .venv. This takes some minutes, once.'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,report]'
	@touch $@

.venv/.installed: .venv/.trains
	@echo 'Installing what the tests need into .venv. This takes some minutes, once.'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: setup
	$(BIN)/python -m benchmarks

crash: setup
	$(BIN)/python -m benchmarks.crash --kills $(N)

measure: setup
	$(BIN)/python tests/measure.py

docs: setup
# The theme warns of a later mkdocs, at length; the version is pinned.
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
