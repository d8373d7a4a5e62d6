# Two commands: `make book` reads, `make test` checks. `make help` lists the rest.
#
#   PYTHON=python3.12           which Python makes .venv (3.10 or newer)
#   TORCH_INDEX=URL             where to look for torch too: https://download.pytorch.org/whl/cpu has the CPU build
#   CONSTRAINTS=                no pins: the newest versions that the floors in pyproject.toml allow
#   VENV_FLAGS=--system-site-packages   keep the packages (torch, say) of the Python underneath

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
EXTRAS ?= torch,quant,distributed,evaluate,book,test
COLAB_PACKAGES ?= https://raw.githubusercontent.com/googlecolab/backend-info/main/pip-freeze.txt

BIN := $(VENV)/bin
PIP_FLAGS = $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SITE := _build/html/index.html
NBVAL := $(BIN)/python -m pytest -q -p no:cacheprovider --nbval-current-env --nbval-cell-timeout=300

.PHONY: help book test env notebooks site lint unit nbval browser schema figures benchmarks records gpu-notebooks \
        colab-drift lock clean
.NOTPARALLEL:
.DEFAULT_GOAL := book

book: notebooks site ## install, execute every chapter on this machine, render the site
	@echo "The book: file://$(CURDIR)/$(SITE)"

test: lint unit nbval site browser ## everything that continuous integration runs

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "make %-15s %s\n", $$1, $$2 }'

env: $(VENV)/.installed ## make .venv and install llmlab with what the book and the tests need

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "llmlab needs Python 3.10 or newer; " \
	    "%s is %d.%d: make PYTHON=python3.12 ..." % (sys.executable, *sys.version_info[:2]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@echo "Installing llmlab[$(EXTRAS)] into $(VENV): minutes on the first run."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	@touch $@

# Threads that wait for one another give the core away: where another program has a core, spinning ones take ten times
# as long.
export OMP_WAIT_POLICY ?= PASSIVE

# Records of this user's own must not change what a page prints: the book reads those of the package.
notebooks nbval gpu-notebooks: export LLMLAB_RECORDS := $(CURDIR)/llmlab/records

notebooks: env ## execute the chapters whose text or code has changed: book/NAME.md -> book/NAME.ipynb
	$(BIN)/python tools/notebooks.py

site: env ## render the site from the notebooks as they are
	@$(BIN)/python tools/stamp.py _build/stamps/site book llmlab benchmarks/results _config.yml _toc.yml constraints.txt -- \
	    $(BIN)/jupyter-book build . -W -n --keep-going --all -q

lint: env schema ## ruff, mypy over the package, and the schemas of the workflows and of CITATION.cff
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: env ## unit tests, doctests, and that texts and notebooks agree
	$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile \
	    tests llmlab --doctest-modules --ignore tests/book/test_browser.py

nbval: env ## run every notebook again and compare every output with the one that is there
	$(NBVAL) --nbval book

browser: env ## open every built page in headless Chromium
	$(BIN)/python -m pytest -q tests/book/test_browser.py

schema: env ## validate the workflows and CITATION.cff
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

figures: env ## make the pictures of the README
	$(BIN)/python tools/figures.py

benchmarks: EXTRAS := $(EXTRAS),benchmarks
benchmarks: env ## llmlab beside its peers, its speed, its overhead, on a GPU its kernels; renews benchmarks/results
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(BIN)/python benchmarks/peers.py --out benchmarks/results
	$(BIN)/python benchmarks/versions.py --out benchmarks/results
	$(BIN)/python benchmarks/held_out.py --out benchmarks/results
	$(BIN)/python benchmarks/operators.py --out benchmarks/results
	$(BIN)/python benchmarks/bert.py --out benchmarks/results
	$(BIN)/python benchmarks/published.py --out benchmarks/results
	$(BIN)/python benchmarks/cpu_grid.py --out benchmarks/results
	$(BIN)/python benchmarks/formulas.py --out benchmarks/results
	$(BIN)/python benchmarks/decoding.py --out benchmarks/results
	$(BIN)/python benchmarks/speed.py --out benchmarks/results
	$(BIN)/python benchmarks/many_gpus.py --out benchmarks/results
	$(BIN)/python benchmarks/measure_overhead.py --out benchmarks/results
	test ! -e /proc/driver/nvidia/version || $(BIN)/python benchmarks/kernel_times.py --out benchmarks/results

records: env ## measure on this GPU what the chapters ask for, and write records
	$(BIN)/llmlab record

gpu-notebooks: EXTRAS := $(EXTRAS),gpu
gpu-notebooks: env ## run every notebook on this GPU into _build/gpu-notebooks, and record peaks and times
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(NBVAL) --nbval-lax book
	$(BIN)/python tools/notebooks.py --force --record --out _build/gpu-notebooks

colab-drift: env ## compare the floors with Colab's current packages (COLAB_PACKAGES=file or URL)
	$(BIN)/python tools/colab_drift.py '$(COLAB_PACKAGES)'

lock: env ## resolve constraints.txt anew from the floors, keeping the pinned torch
	$(BIN)/python tools/lock.py

clean: ## remove what was built; .venv stays
	rm -rf _build .pytest_cache .ruff_cache .hypothesis llmlab.egg-info
