# make demo · make test · make test-all · make lint · make evidence · make gpu-check
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# compiled extensions stay inside the environment
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test test-all lint evidence wheels gpu-check clean install

demo: install
	python launchers/demo.py

# two at a time, each in one thread: many tests start several processes of their own
PYTEST := OMP_NUM_THREADS=1 pytest -n 2 --dist worksteal

test: install
	$(PYTEST)

test-all: install
	$(PYTEST) -m ""

# docs/evidence.md: make evidence TEXT=FILE [ROWS="mdlm-s0 lomdm-s0"] [JOBS=4]
evidence: install
	python -m benchmarks.evidence run $(if $(TEXT),--text $(TEXT)) $(if $(ROWS),--rows $(ROWS)) $(if $(JOBS),--jobs $(JOBS))

lint: install
	ruff check .
	ruff format --check .
	hadolint Dockerfile
	shellcheck launchers/*.sh launchers/slurm.sbatch .ci/run

# A second call finds the stamp and installs nothing. torch comes first and by exact version, so
# that nothing pulls another build of it. A killed compilation leaves a lock that would hang the
# next run without a word: no build is under way here, so any lock is stale.
install: $(VENV)/installed
	@find $(TORCH_EXTENSIONS_DIR) -name lock -delete 2>/dev/null || true

$(VENV)/installed: setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lomdm_dist needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	pip install --quiet --disable-pip-version-check torch -c constraints.txt
	pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

# What a machine with a GPU lacks that has torch alone, and no network: for its Python, which is newer. DeepSpeed
# is built here, without its compiled extensions.
WHEELS := .wheels
wheels: install
	mkdir -p $(WHEELS)
	pip download --quiet --dest $(WHEELS) --no-deps --only-binary :all: --python-version 3.12 \
		--platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 -r benchmarks/gpu_wheels.txt
	DS_BUILD_OPS=0 pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(WHEELS) deepspeed -c constraints.txt
	du -sh $(WHEELS)

# on that machine; writes benchmarks/results/gpu_check.json and .md
gpu-check:
	if [ -d $(WHEELS) ]; then pip install --quiet --no-index --no-deps --target build/site $(WHEELS)/*.whl; fi
	PYTHONPATH=build/site:. python3 benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) data/demo data/demo.json data/demo.jsonl runs/demo
