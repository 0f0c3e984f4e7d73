# `make help` tells what there is. Every target installs what it needs first; nothing is ever asked.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help run shell test test-full cluster-test browser-test gpu-test link-bench install bundle lint format bench guide clean

RANKS ?= 1 2 4 8
ARGS ?=
VENV ?= .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))
export VENV

PYTHON_HERE := $(VENV)/bin/python
HPCTRAIN := $(VENV)/bin/hpctrain
QUICK := runs/quickstart
CLUSTER := munged=munge slurmctld=slurm-wlm slurmd=slurm-wlm srun=slurm-wlm ip=iproute2 tc=iproute2 \
  unshare=util-linux setpriv=util-linux

# One thread a rank; more ranks than cores; root in a container. MPIs other than Open MPI ignore its variables.
export OMP_NUM_THREADS ?= 1
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_ALLOW_RUN_AS_ROOT := 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# What every process would compile anew, its own modules and tests, is kept beside them (make clean removes it).
unexport PYTHONDONTWRITEBYTECODE

# Before `$$launch N program`: the launcher of this environment's MPI, with the flags of its kind.
define LAUNCHER
. $(VENV)/hpctrain.env; \
flags=; case "$$($$MPIRUN --version 2>&1)" in *"Open MPI"*|*OpenRTE*) flags="--oversubscribe --bind-to none";; esac; \
launch="$$MPIRUN $$flags -n"
endef

# What a run wrote goes, by name; then its folder, where nothing else is in it.
define REMOVE_RUN
import sys
from pathlib import Path
from hpctrain.errors import HpctrainError
from hpctrain.watch.folder import delete_run
try:
    delete_run(Path(sys.argv[1]))
except HpctrainError as error:
    sys.exit(str(error))
endef
export REMOVE_RUN

help:
	@echo "make run       install, prepare a corpus, train inputs/quickstart.toml on 2 ranks, plot, generate"
	@echo "make shell     install, open a shell with hpctrain and an mpirun that starts as root, and more ranks than cores"
	@echo "make test      install, serial tests, then MPI tests on each number of RANKS (\"$(RANKS)\"); the commit"
	@echo "               selects the cases (tests/README.md)"
	@echo "make test-full every case of every test on every number of RANKS, then the tests marked slow"
	@echo "make cluster-test  as root: jobs on a virtual Slurm cluster of two nodes; its packages through apt where it may"
	@echo "make browser-test  reports of runs in headless Chromium, which comes through apt where it may"
	@echo "make gpu-test  on a GPU: layouts, offload and speed, in 8 minutes, into build/gpu-test; ARGS=\"--device cpu\""
	@echo "               tries the test itself without a GPU"
	@echo "make link-bench  as root: tokens/s over a link of 100 Mbit/s between two virtual nodes, measured and planned"
	@echo "make install   virtual environment with torch, mpi4py and parallel h5py; MPI and HDF5 through apt where it may"
	@echo "make bundle    what another machine needs to install hpctrain without network, as one archive in build/"
	@echo "make guide     the user guide as a site, in build/guide/site"
	@echo "make lint      ruff, rules of style (tests/style.py), mypy, import-linter"
	@echo "make format    ruff's formatter and its safe fixes"
	@echo "make bench     benchmarks of collectives and of training (inputs/bench/), on 2 ranks"
	@echo "make clean     remove environments, caches and what make run wrote; other runs and kept wheels stay"
	@echo
	@echo "Variables, all optional, as in: make test MPI=mpich RANKS=2"
	@echo "  MPI=openmpi|mpich  which MPI (default: the module's mpicc, else Open MPI); mpich gets its own .venv-mpich"
	@echo "  RANKS=\"1 2 4 8\"    rank counts of make test; from 8 on only what is marked so"
	@echo "  ARGS=\"-k bucket\"   more arguments for pytest"
	@echo "  PYTHON=python3.12  interpreter, 3.10 or newer"
	@echo "  TORCH=yes          torch in the archive of make bundle, which without it uses torch of the other machine"
	@echo "  HDF5_DIR=/prefix   parallel HDF5, where pkg-config and h5pcc do not lead to it"
	@echo "  MPIRUN=\"srun\"      launcher, instead of the mpirun beside mpicc"
	@echo "  GPU=cuda|rocm|xpu|no  build of torch, also for another machine; default: cuda if nvidia-smi finds a GPU,"
	@echo "                     otherwise no"
	@echo "  TORCH_INDEX=URL    package index that torch may come from as well; default: torch's own for GPU;"
	@echo "                     empty: only the indexes that pip is configured with"
	@echo "  FETCH=no           never use apt"

install:
	@containers/install.sh

# Another Python has an environment of its own, so that .venv stays.
bundle: export VENV := $(if $(PYTHON),.venv-$(notdir $(PYTHON)),$(VENV))
bundle: install
	@. $$VENV/hpctrain.env; $$VENV/bin/python containers/bundle.py

test: install
	@. $(VENV)/hpctrain.env; $(PYTHON_HERE) tests/run.py --ranks "$(RANKS)" $(SLOW) -- $(ARGS)

test-full: export HPCTRAIN_ALL_CASES := yes
test-full: SLOW := --slow
test-full: test

cluster-test: install
	@tests/packages.sh cluster $(CLUSTER)
	@. $(VENV)/hpctrain.env; $(PYTHON_HERE) -m pytest -q -n 3 --dist worksteal -o faulthandler_timeout=600 \
	  -m cluster tests/cluster $(ARGS)

browser-test: install
	@tests/packages.sh browser chromium=chromium
	@$(PYTHON_HERE) -m pytest -q -n 2 tests/report/page/test_browser.py $(ARGS)

gpu-test: install
	@. $(VENV)/hpctrain.env; $(PYTHON_HERE) tests/gpu/run.py --output build/gpu-test $(ARGS)

link-bench: install
	@tests/packages.sh cluster $(CLUSTER)
	@. $(VENV)/hpctrain.env; $(PYTHON_HERE) -m tests.cluster.link_speed $(ARGS)

$(QUICK)-data/tokens.h5: | install
	@echo "== corpus: the Python standard library's own sources"
	@library=$$($(PYTHON_HERE) -c 'import sysconfig; print(sysconfig.get_path("stdlib"))'); mkdir -p $(@D); \
	find "$$library" -mindepth 1 -maxdepth 1 \( -type d -o -name '*.py' \) \
	  ! -name '*-packages' ! -name test ! -name __pycache__ ! -name 'config-*' ! -name lib-dynload -print0 | \
	  sort -z | xargs -0 $(HPCTRAIN) prepare $@ --glob '*.py'

run: install $(QUICK)-data/tokens.h5
	@echo "== training inputs/quickstart.toml on 2 ranks"
	@$(LAUNCHER); $$launch 2 $(HPCTRAIN) run inputs/quickstart.toml --fresh
	@echo "== plots"
	@$(HPCTRAIN) plot $(QUICK)
	@echo "== a sample"
	@$(HPCTRAIN) generate $(QUICK) --prompt "def "
	@echo "== checkpoints"
	@ls $(QUICK)/checkpoints/*.h5

# bash takes the function over from the environment; without a terminal it reads commands from stdin.
shell: install
	@$(LAUNCHER); export MPIRUN flags PATH="$(abspath $(VENV))/bin:$$PATH"; \
	mpirun() { command $$MPIRUN $$flags "$$@"; }; export -f mpirun; \
	if [ -t 0 ]; then echo "hpctrain, python and mpirun are those of $(VENV); exit leaves"; fi; \
	exec bash

bench: install
	@$(LAUNCHER); $$launch 2 $(HPCTRAIN) bench collectives; \
	for deck in inputs/bench/*-17m.toml; do echo "== $$deck"; $$launch 2 $(HPCTRAIN) bench train "$$deck"; done

guide: install
	@$(PYTHON_HERE) -m pip install -q '.[docs]'
	@$(HPCTRAIN) guide --write build/guide/docs
	@$(PYTHON_HERE) -m mkdocs build --quiet --strict -f hpctrain/guide/mkdocs.yml

lint: install
	@$(PYTHON_HERE) -m ruff check
	@$(PYTHON_HERE) -m ruff format --check
	@$(PYTHON_HERE) -m tests.style
	@$(PYTHON_HERE) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

format: install
	@$(PYTHON_HERE) -m ruff check --fix --exit-zero --quiet
	@$(PYTHON_HERE) -m ruff format

clean:
	@if [ -d $(QUICK) ]; then $(PYTHON_HERE) -c "$$REMOVE_RUN" $(QUICK) || echo "$(QUICK) stays: see above"; fi
	@rm -f $(QUICK)-data/tokens.h5; if [ -d $(QUICK)-data ]; then rmdir --ignore-fail-on-non-empty $(QUICK)-data; fi
	@if [ -e .venv/pyvenv.cfg ]; then rm -rf .venv; fi
	@for each in .venv .venv-*; do if [ -e "$$each/hpctrain.env" ]; then rm -rf "$$each"; fi; done
	rm -rf build/lib build/bdist.* build/guide build/gpu-test hpctrain.egg-info
	@if [ -d build ]; then rmdir --ignore-fail-on-non-empty build; fi
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find hpctrain tests -name __pycache__ -type d -prune -exec rm -rf {} +
