# `make demo` and `make test` do all set-up by themselves; either may be the first command run.
#
#   PYTHON=python3.12   the interpreter that the virtual environment is made from
#   ARGS='--model vit'  passed on to the demo, pytest or the benchmarks

PYTHON ?= python3
TORCH  ?= 2.13.0
ARGS   ?=

# Two workers; all tests of one parity case on one of them.
PARALLEL ?= -n 2 --dist loadgroup

VENV := .venv
BIN  := $(VENV)/bin

# Torch goes in first, by its exact version, so that no later step chooses another build of it.
TORCH_STAMP := $(VENV)/.installed-torch-$(TORCH)
DEMO_STAMP  := $(VENV)/.installed-demo
DEV_STAMP   := $(VENV)/.installed-dev

# Their requirements would bring torchvision, and with it another torch.
WITHOUT_REQUIREMENTS := memcnn==1.5.2 norse==1.1.0 nirtorch==2.6
PACKAGES_STAMP       := $(VENV)/.installed-packages

.PHONY: help demo test parity packages fuzz lint format bench clean

help:
	@echo "make demo    set up and run the demo"
	@echo "make test    set up and run the whole test suite"
	@echo "make parity  the part of it that compares hundreds of cases with eager"
	@echo "make packages  Functions and models of real packages, compared with eager"
	@echo "make fuzz    more random Functions and trees of regions against eager than the suite has"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make format  let ruff rewrite the source"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove the virtual environments and what the tools left"

demo: $(DEMO_STAMP)
	$(BIN)/python -m hops demo $(ARGS)

test: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

parity: $(DEV_STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity $(PARALLEL) $(ARGS)

packages: $(PACKAGES_STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/parity $(BIN)/python -m pytest tests/packages $(PARALLEL) $(ARGS)

fuzz: $(DEV_STAMP)
	OMP_NUM_THREADS=1 HOPS_FUZZ_EXAMPLES=400 HOPS_FUZZ_RANDOM=1 $(BIN)/python -m pytest tests/fuzz $(ARGS)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .nox build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(TORCH_STAMP):
	$(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install torch==$(TORCH)
	touch $@

$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml
	$(BIN)/python -m pip install -e '.[demo]'
	touch $@

$(DEV_STAMP): $(TORCH_STAMP) pyproject.toml
	$(BIN)/python -m pip install -e '.[test,demo,dev]'
	touch $@

$(PACKAGES_STAMP): $(TORCH_STAMP) pyproject.toml
	$(BIN)/python -m pip install torch==$(TORCH) -e '.[test,packages]'
	$(BIN)/python -m pip install --no-deps $(WITHOUT_REQUIREMENTS)
	touch $@
