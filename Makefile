# Two commands: `make book` reads, `make test` checks. `make help` lists the rest.
#
#   PYTHON=python3.12           which Python makes .venv (3.10 or newer)
#   TORCH_INDEX=URL             where to look for torch too: https://download.pytorch.org/whl/cpu has the CPU build
#   CONSTRAINTS=                no pins: the newest versions that the floors in pyproject.toml allow
#   VENV_FLAGS=--system-site-packages   keep the packages (torch, say) of the Python underneath
#   ISA=avx2                    unit and nbval as an older processor runs them: sse4, avx2 or avx512; NBVAL_ISA: nbval alone
#   PORT=8000                   where `make read` serves the book

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
EXTRAS ?= torch,quant,distributed,evaluate,book,test,release
PORT ?= 8000
COLAB_PACKAGES ?= https://raw.githubusercontent.com/googlecolab/backend-info/main/pip-freeze.txt

BIN := $(VENV)/bin
PIP_FLAGS = $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
HTML := _build/html
STAGE := $(BIN)/python tools/stage.py
PYTEST := $(BIN)/python -m pytest -q -n logical --dist loadfile
TIMES = --junit-xml=_build/durations/$@.xml -o junit_duration_report=total
NBVAL := $(PYTEST) --maxprocesses 2 -p no:cacheprovider -p tools.numeric_outputs --nbval-current-env \
    --nbval-cell-timeout=600

.PHONY: help book read test env notebooks outputs site pdf lint dist unit nbval browser screenshots durations release \
        instruction-sets schema figures benchmarks stacks scripts records gpu-notebooks colab-drift library-names lock clean
.NOTPARALLEL:
.DEFAULT_GOAL := book

book: site ## install what rendering needs (no torch), render the book as it was executed and committed
	@echo "The book: file://$(CURDIR)/$(HTML)/index.html; make read serves it"

read: book ## serve the book on this machine
	@$(BIN)/python tools/serve.py $(PORT) $(HTML)

test: lint dist unit nbval site browser durations ## everything that continuous integration runs

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "make %-17s %s\n", $$1, $$2 }'

env: $(VENV)/.installed ## make .venv and install llmlab with what the chapters and the tests need

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call install,$(EXTRAS))
	@touch $(VENV)/.rendering # which is part of it

$(VENV)/.rendering: pyproject.toml $(CONSTRAINTS)
	$(call install,book)

INTERRUPTED = trap 'echo "Interrupted. Run the same command again: what was downloaded is kept."; exit 130' INT;
# $(call install,EXTRAS): a new or an unfinished .venv is made first, so an interrupted installation goes on.
define install
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install Python 3.10 or newer, or name one:" \
	    "make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "llmlab needs Python 3.10 or newer; " \
	    "%s is %d.%d: make PYTHON=python3.12 ..." % (sys.executable, *sys.version_info[:2]))'
	@$(INTERRUPTED) $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { \
	    echo "$(PYTHON) could not make $(VENV). What it said is above; on Debian: apt install python3-venv"; exit 1; }
	@echo "Installing llmlab[$(1)] into $(VENV): minutes on the first run."
	@$(INTERRUPTED) $(PIP) $(PIP_FLAGS) -e '.[$(1)]' || { df -h . | tail -n 1; echo "Not installed: the reason is above" \
	    "(no network? the disk, the line above, full?). Run the same command again: what was downloaded is kept."; \
	    exit 1; }
	@touch $@
endef

# Threads that wait for one another give the core away: where another program has a core, spinning ones take ten times
# as long.
export OMP_WAIT_POLICY ?= PASSIVE

# Other processors: torch, oneDNN and MKL limited to older instruction sets, and other numbers of threads. avx512 has no
# bf16. Each has its own folder for the kernels that torch.compile makes, because inductor's key does not contain the
# instruction set, and a kernel for AVX-512 that is loaded under AVX2 computes wrong numbers or crashes (torch 2.13).
ISA ?= native
NBVAL_ISA ?= $(ISA)
ISA_sse4 = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=1
ISA_avx2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2
ISA_avx512 = ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 OMP_NUM_THREADS=4
processor = $(if $(filter sse4 avx2 avx512 native,$1),,$(error ISA=$1: give sse4, avx2, avx512 or native)) \
    env $(ISA_$1) $(if $(ISA_$1),TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/_build/inductor/$1)

# Records of this user's own must not change what a page prints: the book reads those of the package.
notebooks outputs nbval gpu-notebooks: export LLMLAB_RECORDS := $(CURDIR)/llmlab/archive

notebooks: env ## execute every chapter on this machine into _build/here, and render that; book/ stays as it is
	@$(STAGE) $@ -- $(BIN)/python tools/notebooks.py --site _build/here

outputs: env ## for authors: execute the chapters whose text or code has changed, book/NAME.md -> book/NAME.ipynb
	@$(STAGE) $@ -- $(BIN)/python tools/notebooks.py

site: $(VENV)/.rendering ## render the site from the notebooks as they are
	@$(STAGE) $@ -- $(BIN)/python tools/stamp.py _build/stamps/site book benchmarks/results _config.yml _toc.yml \
	    constraints.txt -- $(BIN)/jupyter-book build . -W -n --keep-going --all -q
	@$(BIN)/python tools/calculator.py $(HTML)

pdf: $(VENV)/.rendering ## the whole book as one file to print, _build/book.pdf: over a minute, needs Chromium
	@$(BIN)/python tools/pdf.py _build/book.pdf

lint: env schema ## ruff, the order of the imports, mypy over the package, and the schemas of workflows and CITATION.cff
	@$(STAGE) $@ -- sh -c '$(BIN)/ruff check . && $(BIN)/lint-imports --no-cache --no-logo && $(BIN)/mypy'

dist: env ## the wheel and the source archive, as PyPI would take them, into _build/dist
	@rm -rf _build/dist
	@$(STAGE) $@ -- sh -c '$(BIN)/python -m build --no-isolation --outdir _build/dist . >_build/dist.log 2>&1 \
	    || { cat _build/dist.log; exit 1; }; $(BIN)/python -m twine check --strict _build/dist/*'

release: dist ## the same, of a tree that is the release TAG=vX.Y.Z
	@$(BIN)/python tools/release.py "$$TAG"

unit: env ## unit tests, doctests, and that texts and notebooks agree
	@$(STAGE) $@ -- $(call processor,$(ISA)) $(PYTEST) --maxprocesses 4 $(TIMES) \
	    tests llmlab --doctest-modules --ignore tests/book/test_browser.py --ignore tests/book/test_site.py

nbval: env ## run every notebook again and compare every output with the one that is there
	@$(STAGE) $@ -- $(call processor,$(NBVAL_ISA)) $(NBVAL) $(TIMES) --nbval book --ignore book/yours

browser: env ## read every built page, and open it in headless Chromium
	@$(STAGE) $@ -- $(PYTEST) --maxprocesses 2 --dist loadgroup $(TIMES) tests/book/test_site.py tests/book/test_browser.py

screenshots: site env ## write each built page, light and wide, and dark on a phone, to _build/screenshots
	@LLMLAB_SCREENSHOTS=1 $(PYTEST) --maxprocesses 2 --dist loadgroup tests/book/test_browser.py -k fits

durations: env ## print what the last run of each stage took, and its slowest tests
	@$(STAGE)

instruction-sets: env ## unit and nbval as processors without AVX, with AVX2, without bf16, and this one would run them
	for isa in sse4 avx2 avx512 native; do $(MAKE) unit nbval ISA=$$isa || exit 1; done

schema: env ## validate the workflows and CITATION.cff
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff

figures: env ## make the picture of the README and the map of the first page
	$(BIN)/python tools/figures.py

benchmarks: EXTRAS := $(EXTRAS),benchmarks
benchmarks: env stacks site ## llmlab beside its peers, its speed, its overhead, on a GPU its kernels; renews benchmarks/results
	$(PIP) $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(BIN)/python -m benchmarks.memory.peers --out benchmarks/results
	$(BIN)/python -m benchmarks.plans.decisions --out benchmarks/results
	$(BIN)/python -m benchmarks.plans.plans --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.versions --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.held_out --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.room --out benchmarks/results
	$(BIN)/python -m benchmarks.agreement.operators --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.bert --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.published --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.sdpa_loops --out benchmarks/results
	PYTHONPATH=_build/stacks $(BIN)/python -m benchmarks.memory.stacks --out benchmarks/results
	PYTHONPATH=_build/stacks $(BIN)/python -m benchmarks.memory.megatron_golden --out benchmarks/results
	$(BIN)/python -m benchmarks.agreement.cpu_grid --out benchmarks/results
	$(BIN)/python -m benchmarks.agreement.formulas --out benchmarks/results
	$(BIN)/python -m benchmarks.agreement.traces --out benchmarks/results
	$(BIN)/python -m benchmarks.agreement.decoding --out benchmarks/results
	$(BIN)/python -m benchmarks.time.ultrascale --out benchmarks/results
	$(BIN)/python -m benchmarks.time.reinforcement --out benchmarks/results
	$(BIN)/python -m benchmarks.time.mixtures --out benchmarks/results
	$(BIN)/python -m benchmarks.time.throughput --out benchmarks/results
	$(BIN)/python -m benchmarks.memory.measured --out benchmarks/results
	$(BIN)/python -m benchmarks.speed.speed --out benchmarks/results
	$(BIN)/python -m benchmarks.serving.serving --out benchmarks/results
	$(BIN)/python -m benchmarks.serving.kv_cache --out benchmarks/results
	$(BIN)/python -m benchmarks.speed.calculator --out benchmarks/results
	$(BIN)/python -m benchmarks.speed.many_gpus --out benchmarks/results
	$(BIN)/python -m benchmarks.speed.measure_overhead --out benchmarks/results
	test ! -e /proc/driver/nvidia/version || $(BIN)/python -m benchmarks.kernels.kernel_times --out benchmarks/results
	test ! -e /proc/driver/nvidia/version || $(BIN)/python -m benchmarks.kernels.kernel_times --sweep --out benchmarks/results

stacks: env ## other stacks' own packages into _build/stacks, for `lab.simulate(..., stack=...)`: PYTHONPATH=_build/stacks
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target _build/stacks torchtitan==0.2.2 tyro \
		docstring_parser shtab typeguard torchdata einops tomli tensorboard protobuf \
		torchtune==0.6.1 torchao==0.9.0 omegaconf antlr4-python3-runtime==4.9.3 kagglehub tiktoken sentencepiece \
		blobfile pycryptodomex megatron-core==0.16.1 \
		litgpt==0.5.13 lightning==2.6.1 lightning-utilities==0.15.3 torchmetrics==1.9.0 jsonargparse==4.41.0

scripts: env ## other people's scripts under `llmlab run`: CLONES=their repositories WORK=a folder for stand-ins
	$(BIN)/python -m benchmarks.scripts.standins --clones $(CLONES) --work $(WORK)
	CLONES=$(CLONES) WORK=$(WORK) $(BIN)/python -m benchmarks.scripts.scripts --out benchmarks/results
	PEFT=$(CLONES)/peft WORK=$(WORK) $(BIN)/python -m benchmarks.scripts.peft_methods --out benchmarks/results
	CLONES=$(CLONES) WORK=$(WORK) $(BIN)/python -m benchmarks.scripts.published_runs --out benchmarks/results

records: env ## measure on this GPU what the chapters ask for, and write records
	$(BIN)/llmlab record

gpu-notebooks: EXTRAS := $(EXTRAS),gpu
gpu-notebooks: env ## run every notebook on this GPU into _build/gpu-notebooks, and record peaks and times
	$(PIP) $(PIP_FLAGS) -e '.[$(EXTRAS)]'
	$(NBVAL) -n 0 --nbval-lax book # one GPU
	$(BIN)/python tools/notebooks.py --force --record --out _build/gpu-notebooks

library-names: env ## which releases of other libraries are installed, and whether they have the names that are patched
	@$(BIN)/python -m pip list
	@$(BIN)/python -m pytest -q tests/base/test_compat.py

colab-drift: env ## compare the floors with Colab's current packages (COLAB_PACKAGES=file or URL)
	$(BIN)/python tools/colab_drift.py '$(COLAB_PACKAGES)'

lock: env ## resolve constraints.txt anew from the floors, keeping the pinned torch
	$(BIN)/python tools/lock.py

clean: ## remove what was built; .venv stays
	rm -rf _build .pytest_cache .ruff_cache .hypothesis llmlab.egg-info
