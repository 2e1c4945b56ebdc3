# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Asked for by exact version first, so that a CPU build that pip knows of is taken before a newer CUDA build.
TORCH  ?= torch==2.13.0
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo demo-64 test quick lint format types docs bench serve clean system

demo: $(VENV)/.demo
	$(BIN)/neffcache demo --ranks 8 --hosts 2

demo-64: $(VENV)/.demo
	$(BIN)/neffcache demo --ranks 64 --hosts 8 --json out.json

test: lint types system
	$(BIN)/python -m pytest -n 2

# Programs that tests start and pip cannot bring. As root they are installed from Debian's packages.
PROGRAMS := chromium haproxy nginx
system:
	@missing=""; for p in $(PROGRAMS); do command -v $$p >/dev/null || test -x /usr/sbin/$$p || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	elif [ -n "$$missing" ]; then echo "please install:$$missing" >&2; exit 1; fi

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy

serve: $(VENV)/.demo
	$(BIN)/neffcache serve

bench: $(VENV)/.dev
	for b in launcher_hit import_torch key_cost; do $(BIN)/python benchmarks/$$b.py || exit 1; done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --editable ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --editable ".[dev]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
