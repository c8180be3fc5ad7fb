# Two commands need nothing but Python >= 3.10 and make: `make demo` and `make test`.
# `make test TORCH=2.14.1` tests with another torch, in an environment of its own.
# Everything is installed into .venv; stamp files in there keep an install from being repeated.

PYTHON ?= python3
# Another torch than the one in constraints.txt: a version, "lowest" (of setup.cfg), "newest" or "nightly"
TORCH ?=
VENV := .venv$(addprefix -torch-,$(TORCH))
JAX_VENV := .venv-jax
OTHERS_VENV := .venv-integrations
BIN := $(VENV)/bin
# More arguments for the command that a target runs, e.g. make test ARGS="-k digits -n 0"
ARGS ?=
# More arguments for pip, e.g. PIP_ARGS="--extra-index-url ..." for a torch build without CUDA
PIP_ARGS ?=
ifeq ($(TORCH),nightly)
  override PIP_ARGS += --pre --extra-index-url https://download.pytorch.org/whl/nightly/cpu
endif
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
INSTALL := $(PIP) install $(PIP_ARGS) -c $(VENV)/constraints.txt
# What an install is made of: another one follows a change of these, which builds the engine, too.
REQUIREMENTS := setup.cfg setup.py pyproject.toml constraints.txt $(wildcard solvers/native/*.cpp solvers/native/*.h \
  implicit_attn/kernels/bi_softmax/cpp/*.cpp implicit_attn/kernels/bi_softmax/cpp/*.h)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-processors test-all fuzz lint format types api docs docs-serve bench clean bench-jax dist dist-test integrations \
	notebooks

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/examples.stamp ## three things that equilibrium layers can do; pictures in runs/demo
	$(BIN)/implicit-attn demo $(ARGS)

# A test that hangs fails after ten minutes. "thread" also ends what waits within a library, where a signal
# would not be heard.
PYTEST = $(BIN)/python -m pytest -n auto --timeout 600 --timeout-method thread
test: $(VENV)/test.stamp ## run the tests (ARGS="..." goes to pytest; TORCH=2.14.1, another torch)
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/test.stamp ## the others: examples, compilers, processes, Triton's kernels
	OMP_NUM_THREADS=1 $(PYTEST) -m slow $(ARGS)

# Code that is compiled for one processor must not be found by another. Only what differs by processor or by
# the number of threads is repeated: the engine, the methods in it, linear systems and kernels.
OTHER = TORCHINDUCTOR_CACHE_DIR=$$(mktemp -d) $(PYTEST) -q -m "not slow" $(ARGS)
BY_PROCESSOR := tests/solvers/test_engine.py tests/solvers/test_krylov.py tests/solvers/test_methods.py tests/kernels
test-processors: $(VENV)/test.stamp ## the engine and the kernels as other processors and two threads compute them
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(OTHER) $(BY_PROCESSOR)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=1 $(OTHER) $(BY_PROCESSOR)
	OMP_NUM_THREADS=2 $(OTHER) -n 1 tests/solvers/test_engine.py tests/deq/test_threads_and_processes.py

test-all: ## everything that is run before a release
	$(MAKE) test test-slow test-processors integrations
	$(MAKE) fuzz ARGS="--cases 2000"

fuzz: $(VENV)/test.stamp ## random cases of everything (ARGS="--cases 100000 --workers 2")
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python -m fuzz.run $(ARGS)

lint: $(VENV)/dev.stamp ## ruff: rules and formatting, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/dev.stamp ## ruff: mend what can be mended, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/dev.stamp ## basedpyright
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The notice that is silenced is Material's, of releases to come; every other warning is an error.
docs: $(VENV)/docs.stamp ## the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

api: $(VENV)/test.stamp ## write the tables of docs/api
	$(BIN)/python -m tools.names

docs-serve: $(VENV)/docs.stamp ## the site at http://127.0.0.1:8000, built again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

bench: $(VENV)/test.stamp ## ratios against torchdeq, printed
	$(BIN)/python benchmarks/vs_torchdeq.py $(ARGS)

bench-jax: $(VENV)/examples.stamp $(JAX_VENV)/stamp ## ratios against JAX, printed
	$(BIN)/python benchmarks/vs_jax.py $(ARGS)

dist: $(VENV)/dev.stamp ## build wheel and sdist into dist/
	@rm -rf dist build *.egg-info/SOURCES.txt
	$(BIN)/python -m build --no-isolation .

dist-test: dist ## install what was built into an empty environment outside of the repository, and try it
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python tests/workers/distribution.py dist

notebooks: $(VENV)/examples.stamp ## run docs/notebooks and write their pages (ARGS="own_energy" for one)
	$(BIN)/python docs/notebooks/build.py $(ARGS)

integrations: $(OTHERS_VENV)/stamp ## test the examples with other libraries: timm, Hugging Face and more
	OMP_NUM_THREADS=1 $(OTHERS_VENV)/bin/python -m pytest tests/examples/test_integrations.py $(ARGS)

clean: ## remove the environments and caches; runs/ stays
	rm -rf .venv .venv-torch-* $(JAX_VENV) $(OTHERS_VENV) build dist site *.egg-info solvers/native/lib .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "$(PYTHON) was not found: install Python 3.10 or newer, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# The pins, of which those of torch and of what belongs to it give way to TORCH.
$(VENV)/constraints.txt: $(VENV)/python.stamp constraints.txt setup.cfg
ifeq ($(TORCH),)
	@cp constraints.txt $@
else
	@grep -v -E '^(torch|torchvision|triton)==' constraints.txt > $@
	@case "$(TORCH)" in \
	  newest|nightly) ;; \
	  lowest) sed -n 's/^ *torch>=\([0-9.]*\).*/torch==\1.*/p' setup.cfg >> $@ ;; \
	  *) echo "torch==$(TORCH)" >> $@ ;; \
	esac
endif

$(VENV)/examples.stamp: $(VENV)/constraints.txt $(REQUIREMENTS)
	@echo "installing the package and what the examples need into $(VENV) (minutes the first time) ..."
	@$(INSTALL) -e ".[examples]"
	@touch $@

$(VENV)/test.stamp: $(VENV)/constraints.txt $(REQUIREMENTS)
	@echo "installing the package and what the tests need into $(VENV) (minutes the first time) ..."
	@$(INSTALL) -e ".[test]"
	@touch $@ $(VENV)/examples.stamp

$(VENV)/dev.stamp: $(VENV)/constraints.txt $(REQUIREMENTS)
	@echo "installing the package and the developer's tools into $(VENV) (minutes the first time) ..."
	@$(INSTALL) -e ".[test,dev]"
	@touch $@ $(VENV)/test.stamp $(VENV)/docs.stamp $(VENV)/examples.stamp

$(VENV)/docs.stamp: $(VENV)/constraints.txt $(REQUIREMENTS)
	@echo "installing the package and what its documentation needs into $(VENV) (minutes the first time) ..."
	@$(INSTALL) -e ".[docs]"
	@touch $@

# Beside the other environment: JAX must not decide which versions we are measured with.
$(JAX_VENV)/stamp: benchmarks/jax_peers/requirements.txt $(VENV)/python.stamp
	@echo "installing JAX and its solvers into $(JAX_VENV) ..."
	@$(BIN)/python -m venv $(JAX_VENV)
	@$(JAX_VENV)/bin/python -m pip --quiet --disable-pip-version-check install $(PIP_ARGS) -r $<
	@touch $@

# An environment on top of the first one, which keeps its packages: those of the integrations are many,
# and some import each other wherever they find them.
$(OTHERS_VENV)/stamp: $(VENV)/test.stamp
	@echo "installing the libraries of examples/integrations into $(OTHERS_VENV) ..."
	@$(BIN)/python -m venv $(OTHERS_VENV)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(OTHERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/first.pth"
	@$(OTHERS_VENV)/bin/python -m pip --quiet --disable-pip-version-check install $(PIP_ARGS) -c $(VENV)/constraints.txt \
	  "implicit-attn[integrations]"
	@touch $@
