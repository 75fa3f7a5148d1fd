# Sets up a virtual environment, builds the package in it, and runs something: `make help` lists what.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
# What they mean is in build_support/settings.py. A change of one of them rebuilds.
export CODA_CUDA CODA_PROGRAMS TORCH_CUDA_ARCH_LIST CODA_FORCE_ARCH CUDA_HOME CUTLASS_PATH

PY := $(VENV)/bin/python
STAMP := $(VENV)/stamps
SOURCES := setup.py pyproject.toml coda/__init__.py $(shell find csrc build_support third_party -type f -not -name '*.pyc')
GPU := $(firstword $(wildcard /dev/nvidia[0-9]))
SETTINGS := $(CODA_CUDA)|$(CODA_PROGRAMS)|$(TORCH_CUDA_ARCH_LIST)|$(CODA_FORCE_ARCH)|$(CUDA_HOME)|$(CUTLASS_PATH)|$(GPU)
TOOLS_PATH = PATH="$(abspath $(VENV))/bin:$$PATH"
# CUTLASS comes without its dependencies, see third_party/README.md; pip need not complain about that.
INSTALL := $(PY) -m pip --disable-pip-version-check --quiet install --no-warn-conflicts
GET_CUTLASS = [ -n "$$CUTLASS_PATH" ] || $(INSTALL) --no-deps "$$($(PY) third_party/cutlass.py --wheel)"

.PHONY: help train test kernels bench clean FORCE

help:
	@echo "make train    train the example language model: examples/train.py \$$(ARGS)"
	@echo "make test     run the test suite: pytest \$$(ARGS)"
	@echo "make kernels  compile every CUDA kernel for every architecture; needs nvcc, but no GPU and no torch"
	@echo "make bench    build the microbenchmark build/bench/coda_bench; needs CMake, nvcc and cuBLASLt"
	@echo "make clean    remove what was built, and $(VENV)"
	@echo
	@echo "Settings, such as make test PYTHON=python3.12 CODA_CUDA=0:"
	@echo "  PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) ARGS='...'"
	@echo "  CODA_CUDA=auto|0|1 CODA_PROGRAMS=a,b TORCH_CUDA_ARCH_LIST=9.0 CODA_FORCE_ARCH=sm80 MAX_JOBS=n CUDA_HOME=folder CUTLASS_PATH=folder"

train: $(STAMP)/built $(STAMP)/examples
	@cat $(STAMP)/backend
	$(PY) examples/train.py $(ARGS)

test: $(STAMP)/built $(STAMP)/examples $(STAMP)/test
	@cat $(STAMP)/backend
	$(PY) -m pytest $(ARGS)

kernels: $(STAMP)/tools
	@$(PY) third_party/cutlass.py >/dev/null 2>&1 || $(GET_CUTLASS)
	$(PY) -m build_support kernels $(ARGS)

bench: kernels
	$(TOOLS_PATH) cmake -S . -B build/bench -G Ninja -DPython3_EXECUTABLE="$(abspath $(PY))" \
	    -DCODA_PROGRAMS="$(CODA_PROGRAMS)" -DCODA_OBJECTS="$(CURDIR)/build/kernels/obj"
	$(TOOLS_PATH) cmake --build build/bench

clean:
	rm -rf build dist *.egg-info coda/_C*.so $(VENV)

# Where torch is installed already, the environment shares it. pip leaves alone what it finds, so that no network is needed on a machine
# that has setuptools, wheel, pytest, tqdm and matplotlib too.
$(STAMP)/tools:
	@$(PYTHON) build_support/make_venv.py $(VENV)
	@$(INSTALL) "setuptools>=77,<82" wheel ninja || $(PY) -c "import setuptools, wheel"
	@mkdir -p $(STAMP) && touch $@

$(STAMP)/torch: $(STAMP)/tools
	@$(PY) -c "import torch" 2>/dev/null || { echo "coda: installing $(TORCH)"; $(INSTALL) "$(TORCH)"; }
	@touch $@

# Written anew only when a setting has changed.
$(STAMP)/settings: $(STAMP)/torch FORCE
	@echo '$(SETTINGS)' | cmp -s - $@ || echo '$(SETTINGS)' > $@

$(STAMP)/built: $(STAMP)/settings $(SOURCES)
	@missing=$$($(PY) -m build_support missing) && { [ "$$missing" != cutlass ] || $(GET_CUTLASS); }
	@$(PY) -m build_support prepare
	@echo "coda: building the extension"
	@$(INSTALL) --no-build-isolation --no-deps -e .
	@$(PY) -W ignore -c "import coda; print('coda:', coda.info()['backend'])" > $(STAMP)/backend
	@touch $@

# The package is installed, so that pip fetches only what its extras lack.
$(STAMP)/examples: | $(STAMP)/built
	@$(INSTALL) "coda-kernels[examples]"
	@touch $@

$(STAMP)/test: | $(STAMP)/built
	@$(INSTALL) "coda-kernels[test]" || \
	    { $(PY) -c "import pytest" && echo "coda: note: the extra [test] is not complete; tests that need the rest of it are skipped"; }
	@touch $@
