# make demo, make test, make lint: each in a virtual environment with a wheel built from this checkout.
# VENV is that environment; TORCH is what pip installs as torch; EXTRAS are the package's extras.

VENV ?= .venv
PYTHON ?= python3

ifneq ($(shell nvidia-smi -L 2>/dev/null),)
TORCH ?= torch
EXTRAS ?= dev,cuda13
else
TORCH ?= torch==2.13.0
EXTRAS ?= dev
endif

# Windows has Scripts and python.exe, every other platform bin.
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/.installed-$(subst =,-,$(TORCH))
SOURCES := $(wildcard pyproject.toml MANIFEST.in README.md LICENSE py.typed *.py) \
	$(shell find scheduler steps memory kernels -name '*.py' -o -name '*.cu')
# A folder changes when a file in it comes or goes, so that a deleted module is not left in the environment.
FOLDERS := $(shell find scheduler steps memory kernels -type d -not -name __pycache__)

.PHONY: demo test lint install clean

demo: $(STAMP)
	$(BIN)/expertstream demo

test: $(STAMP)
	$(BIN)/pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy -p expertstream
	$(BIN)/mypy tests

install: $(STAMP)

# Breaks the source one line at a time: tests/mutation/README.md.
.PHONY: mutation
mutation: $(STAMP)
	$(BIN)/python tests/mutation/run.py

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself, so that the requirement of the package is then met by it. The package is built
# from a copy: setuptools writes build/ and *.egg-info beside the source, and a stale build/ would ship deleted files.
$(STAMP): $(SOURCES) $(FOLDERS) | $(VENV)/pyvenv.cfg
	@echo 'installing into $(VENV)'
	@$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	@set -e; copy=$$(mktemp -d); trap 'rm -rf "$$copy"' EXIT; mkdir "$$copy/source" "$$copy/wheel"; \
	for name in $(SOURCES); do mkdir -p "$$copy/source/$$(dirname $$name)"; cp "$$name" "$$copy/source/$$name"; done; \
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$$copy/wheel" "$$copy/source"; \
	wheel=$$(ls "$$copy"/wheel/*.whl); \
	$(BIN)/pip install --quiet --disable-pip-version-check "$$wheel[$(EXTRAS)]" '$(TORCH)'; \
	$(BIN)/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$$wheel"
	@rm -f $(VENV)/.installed-*; touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
