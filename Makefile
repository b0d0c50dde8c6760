# What a developer and CI run. `make demo` and `make test` need Python 3.11+ and a package registry, nothing else.
#
#   PYTHON=python3.12 make test    another interpreter for the environment
#   REPEAT=20 make faults          every test so many times; those that draw their moments draw others
#   DURE_NO_VENV=1 make gpu-check  no environment, no installing: $(PYTHON) as it is

PYTHON ?= python3
VENV ?= .venv
DURE_NO_VENV ?= 0
PYTEST_ARGS ?=
REPEAT ?= 1
# four tests at a time, because many wait; two of those that kill or take long. Those that measure time have the machine
# for themselves (tests/turns.py)
FOUR := -n 4 --dist worksteal
TWO := -n 2 --dist worksteal

ifeq ($(DURE_NO_VENV),1)
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
CORE :=
DEMO :=
DEV :=
BENCH :=
ZOO :=
else
PY := $(VENV)/bin/python
CORE := $(VENV)/.dure-core
DEMO := $(VENV)/.dure-demo
DEV := $(VENV)/.dure-dev
BENCH := $(VENV)/.dure-bench
ZOO := $(VENV)/.dure-zoo
endif

INSTALL = @echo "installing into $(VENV) (torch is large: this can take minutes, and says nothing)" && \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

GPU_PYTHON ?= 3.12
GPU_PLATFORMS := $(foreach glibc,2_28 2_27 2_17 2_12,manylinux_$(glibc)_x86_64) manylinux2014_x86_64
GPU_PACKAGES := annotated-types attrs cyclopts docstring-parser markdown-it-py mdurl nvidia-ml-py psutil pydantic \
	pydantic-core pygments rich rich-rst safetensors typing-extensions typing-inspection xxhash

LOGGERS_VENV ?= .venv-loggers
CLUSTER_VENV ?= .venv-cluster
CLUSTER_PACKAGES := slurmctld slurmd slurm-client munge openmpi-bin
CLUSTER_PROGRAMS := munged slurmctld slurmd srun mpirun

.PHONY: help demo test check format lint types floors slow faults hosts zoo simulated browser loggers cluster gpu-wheels gpu-check bench soak campaign clean
.DELETE_ON_ERROR:

help: ## show these targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | expand -t 14

demo: $(DEMO) ## train the digits task on 2 processes and show the table
	$(PY) -m dure train examples/digits.py:Digits --strategy ddp --nproc 2

test: $(DEV) ## run the test suite (without the slow and the fault tests)
	$(PY) -m pytest $(FOUR) $(PYTEST_ARGS)

check: format lint types floors test ## everything that must hold before a commit

format: $(DEV) ## is everything formatted?
	$(PY) -m ruff format --check .

lint: $(DEV) ## is there anything that ruff minds?
	$(PY) -m ruff check .

types: $(DEV) ## do the types hold?
	$(PY) -m mypy

floors: $(DEV) ## does every module import its own floor or lower?
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

slow: $(DEV) ## run the tests that take longer
	$(PY) -m pytest $(TWO) -m slow $(PYTEST_ARGS)

faults: $(DEV) ## run the tests that kill, hang and slow ranks
	$(PY) -m pytest -m faults --count $(REPEAT) $(PYTEST_ARGS)

hosts: $(DEV) ## cut the cables of three hosts, and reboot them (needs root)
	$(PY) -m pytest -m hosts $(PYTEST_ARGS)

browser: $(VENV)/.dure-browser ## open the page of a run in Chromium, which is installed first (Debian; as root)
	command -v chromium >/dev/null || apt-get install -y chromium
	$(PY) -m pytest -m browser tests/report $(PYTEST_ARGS)

loggers: $(LOGGERS_VENV)/.dure-loggers ## hand runs over to a real MLflow server and to W&B's client, which are installed first
	$(LOGGERS_VENV)/bin/python -m pytest -m loggers tests/tracking $(PYTEST_ARGS)

simulated: $(DEV) ## run the tests on simulated CUDA devices, which are compiled with g++ first
	$(PY) -m pytest $(FOUR) -m "simulated and not zoo" tests/simulated_cuda $(PYTEST_ARGS)

zoo: $(ZOO) ## run every cell of the table of what works, those of timm and transformers too
	$(PY) -m pytest $(FOUR) -m "slow or zoo or not slow" tests/conformance/zoo tests/simulated_cuda/test_zoo_on_devices.py $(PYTEST_ARGS)

cluster: $(CLUSTER_VENV)/.dure-cluster ## install Slurm, Open MPI (Debian) and Ray, and run the tests that use them
	@for program in $(CLUSTER_PROGRAMS); do command -v $$program >/dev/null || missing=1; done; \
	if [ -n "$$missing" ]; then \
		command -v apt-get >/dev/null || { echo "this needs $(CLUSTER_PROGRAMS): install them" >&2; exit 1; }; \
		as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(CLUSTER_PACKAGES); \
	fi
	$(CLUSTER_VENV)/bin/python -m pytest -m cluster tests/cluster $(PYTEST_ARGS)

gpu-wheels: ## fetch into wheels/ what a CUDA machine with torch but no network lacks; GPU_PYTHON=3.12 is its Python
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -c constraints.txt \
		--python-version $(GPU_PYTHON) --implementation cp $(addprefix --platform ,$(GPU_PLATFORMS)) -d wheels $(GPU_PACKAGES)
	@echo "there: python3 -m pip install --no-index --no-deps wheels/*.whl && DURE_NO_VENV=1 make gpu-check"

gpu-check: $(CORE) ## conformance, precision and memory on CUDA; the script exits 3 where there is no CUDA device
	$(PY) benchmarks/gpu_check.py

bench: $(BENCH) ## overhead per step beside the bare loop, DDP by hand, Accelerate and Fabric
	$(PY) benchmarks/overhead.py

soak: $(DEMO) ## train for half an hour with a fault every 30 seconds
	$(PY) benchmarks/soak.py

campaign: $(DEV) ## disturb 300 runs, each with a random fault, and see whether every promise is kept
	$(PY) benchmarks/campaign.py

clean: ## remove the environment, caches and builds; runs stay
	rm -rf $(VENV) $(CLUSTER_VENV) $(LOGGERS_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# pip and not python is the target: a venv that could not get pip is no venv
$(VENV)/bin/pip:
	@command -v $(PYTHON) >/dev/null || { \
		echo "dure needs Python 3.11 or newer, but there is no '$(PYTHON)': install it, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "dure needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name a newer one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# a stamp is made when its installation is done, so a repeated make installs nothing
$(VENV)/.dure-core: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dure-demo: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[digits]'
	@touch $@

$(VENV)/.dure-dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.dure-core $(VENV)/.dure-demo

$(VENV)/.dure-browser: $(VENV)/.dure-dev
	$(INSTALL) -e '.[browser]'
	@touch $@

# an environment of its own: Ray brings forty megabytes that nothing else needs
$(CLUSTER_VENV)/.dure-cluster: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTER_VENV)
	@echo "installing into $(CLUSTER_VENV) (torch and Ray are large: this can take minutes, and says nothing)"
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cluster]'
	@touch $@

# an environment of its own: MLflow's server brings seventy packages that nothing else needs
$(LOGGERS_VENV)/.dure-loggers: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOGGERS_VENV)
	@grep -v '^pyarrow==' constraints.txt >$(LOGGERS_VENV)/constraints.txt # MLflow does not take the newest one yet
	@echo "installing into $(LOGGERS_VENV) (torch and MLflow are large: this can take minutes, and says nothing)"
	$(LOGGERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOGGERS_VENV)/constraints.txt -e '.[loggers]' pytest pytest-timeout
	@touch $@

$(VENV)/.dure-zoo: $(DEV)
	$(INSTALL) -e '.[dev,zoo]'
	@touch $@

$(VENV)/.dure-bench: $(DEV)
	$(INSTALL) -e '.[dev,bench]'
	@touch $@
