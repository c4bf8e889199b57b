# `make demo` and `make test` do all of their own set-up in .venv; they need Python 3.10 or newer and nothing else.
PYTHON ?= python3
VENV := .venv
# Two halves of the tests at once, each with ranks of its own: most tests wait for processes, or for one core.
WORKERS ?= -n 2 --dist worksteal
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Thousands of processes start in the tests: each compiles the package again where this says that none may keep it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test bench cells clients install-clients install-dev gpu-kernels torch-releases wheel lint types architecture docs format clean

help:
	@echo "make demo    train a small GPT on real text, resume it, and plot the loss (examples/pretrain_gpt)"
	@echo "make test    run the test suite, without the tests marked slow and those of gpu-kernels"
	@echo "make cells N=200 SEED=7  train random combinations of features against plain PyTorch (tests/cells)"
	@echo "make bench   time everything beside the rivals that are installed, an hour (benchmarks/README.md); BENCH=--quick"
	@echo "make clients run the tests with Transformers, Accelerate, Lightning, TRL and PEFT, in their newest releases"
	@echo "make gpu-kernels  compile and interpret the kernels for GPUs, with Triton, on a machine without one"
	@echo "make torch-releases  test with every supported release of torch, each downloaded (.ci/torch_releases)"
	@echo "make wheel   build the source archive and the wheel in the folder dist, and try the wheel"
	@echo "make docs    build the documentation as a site, in the folder site"
	@echo "make lint | types | architecture | format | clean"

demo: $(VENV)/.installed-demo
	@echo "starting the demo: about four minutes"
	$(BIN)/python examples/pretrain_gpt/demo.py

install-dev: $(VENV)/.installed-dev

test: install-dev
	$(BIN)/python -m pytest $(WORKERS) -m "not slow" --ignore tests/pretended_gpu --durations=40 --durations-min=5

# Goes on where it was stopped: results are in tests/cells/results.
N ?= 40
SEED ?= 1
cells: $(VENV)/.installed-dev
	$(BIN)/python -m tests.cells --count $(N) --seed $(SEED)

# In an environment of its own, so that `make test` stays what it is; once that is made nothing is downloaded.
CLIENTS := $(VENV)/clients
ALONE := mup==1.0.0 deepspeed-mii==0.3.3  # without the libraries for pictures and for GPUs that they ask for
# They ask our server; an S3 server and its client; GGUF files; schemas of Kubernetes and Kubeflow.
ASKING := lm_eval[api]==0.4.13 openai==3.57.0 s3fs==2026.9.0 moto[server]==5.2.5 gguf==0.19.0 \
	kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4
install-clients: $(VENV)/.created
	@$(MAKE) VENV=$(CLIENTS) $(CLIENTS)/.installed-test,clients
	@$(CLIENTS)/bin/python -c "import mup, importlib.metadata as m; m.version('deepspeed-mii')" 2>/dev/null \
		|| $(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(ALONE)
	@$(CLIENTS)/bin/python -c "import lm_eval, openai, s3fs, moto, gguf, kubernetes_validate, kubeflow_trainer_api, kubeflow.training" 2>/dev/null \
		|| $(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(ASKING)

BENCH ?= --save cpu2
bench: install-dev
	$(BIN)/python benchmarks/everything.py $(BENCH)

clients: install-clients
	HF_HUB_OFFLINE=1 $(CLIENTS)/bin/python -m pytest $(WORKERS) -m "not slow" \
		tests/clients tests/examples/test_clients.py "tests/examples/test_notebooks.py::test_a_notebook_runs[serving]" tests/examples/test_clusters.py tests/config/test_client_files.py tests/planning/memory/test_command.py \
		tests/zero/test_init_peak.py tests/cells/test_families.py tests/transforms/recompute/test_marked_inputs.py \
		tests/inference/test_serve_command.py tests/inference/test_responses.py tests/examples/test_flops_profiler.py \
		tests/examples/test_rlhf.py tests/examples/test_rlhf_ranks.py tests/benchmarks/test_quick.py \
		"tests/pretended_gpu/test_benchmarks.py::test_a_script_ends_with_its_tables[lightning_strategy]"

# Triton lies in a folder of its own, so that `make test` stays what it is, unless torch has brought it along. What it
# compiles is kept beside it.
TRITON := $(VENV)/triton
gpu-kernels: $(VENV)/.installed-dev $(TRITON)/.installed-3.9.0
	folder="$$(cd $(TRITON) && pwd)"; PYTHONPATH="$$folder" TRITON_CACHE_DIR="$$folder/cache" $(BIN)/python -m pytest $(WORKERS) -m "not slow" \
		tests/ops/gpu tests/pretended_gpu tests/inference/test_launched.py

torch-releases: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python .ci/torch_releases

# Needs no torch to build; what `make test` installs, to try what was built.
wheel: $(VENV)/.build
	$(BIN)/python tools/wheel.py dist

SPELLED := $(wildcard *.md) docs examples deepspeed csrc tools benchmarks docker
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $(SPELLED)
	$(BIN)/python tools/check_commits.py
	$(BIN)/python tools/house.py --check

types: $(VENV)/.installed-dev
	$(BIN)/pyright --pythonpath $(BIN)/python

architecture: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -s tests/test_architecture.py

# The site, in the folder `site`; any broken link or reference is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/python tools/gen_config_docs.py
	$(BIN)/python tools/draw_diagrams.py
	$(BIN)/python tools/write_plans.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist site $(VENV) deepspeed/lib

# ---- set-up -----------------------------------------------------------------------------------------------------------

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "deepspeed needs Python 3.10 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What the build needs, so that the package is built in this environment and not in one of its own.
$(VENV)/.build: $(VENV)/.created constraints.txt
	@$(PIP) scikit-build-core cmake ninja
	@touch $@

# torch is asked for by exact version before anything that depends on it.
$(VENV)/.torch: $(VENV)/.build
	@echo "installing torch 2.13.0 in $(VENV): a large download, the first time"
	@$(PIP) torch==2.13.0
	@touch $@

$(TRITON)/.installed-%: | $(VENV)/.torch
	@rm -rf $(TRITON) && mkdir -p $(TRITON)
	@$(BIN)/python -c "import triton" 2>/dev/null || { \
		echo "installing triton $* in $(TRITON): 1 GB, the first time"; \
		$(PIP) --no-deps --target $(TRITON) triton==$*; }
	@touch $@

# Beside the sources, where every environment that has the package installed as an editable one finds it. Compiled here and
# not by pip, so that it is compiled once, and after a change only what changed. Without a compiler there is none.
LIBRARY := deepspeed/lib/libdeepspeed_host.$(if $(filter Darwin,$(shell uname -s)),dylib,so)
SOURCES := CMakeLists.txt $(wildcard csrc/*/*.cpp csrc/*/*.h)

$(LIBRARY): $(SOURCES) | $(VENV)/.torch
	@echo "compiling the native library: the first time about 200 s of one core, shared between all there are"
	@$(BIN)/cmake -S . -B build/host -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN)/ninja)" >/dev/null
	@$(BIN)/cmake --build build/host
	@touch -c $@

$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml | $(LIBRARY)
	@echo "installing this package in $(VENV), with what [$*] needs"
	@$(PIP) --no-build-isolation -C wheel.cmake=false -e ".[$*]"
	@touch $@
