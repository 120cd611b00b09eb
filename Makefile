# Two commands: `make demo` and `make test`. Both make .venv on their first run.

PYTHON ?= python3
RUN = .venv/bin/python
# Tests compile more than they compute: LLVM's optimisations, emitters of fusions and
# programs cut up for threads cost more than they gain. XLA of jax 0.11 has no fusions
# without emitters, and aborts at the flag.
EMITTERS = $(if $(shell ls -d .venv/lib/python*/site-packages/jax-0.10.* 2>&-),\
  --xla_cpu_use_fusion_emitters=false)
QUICK = JAX_PLATFORMS=cpu XLA_FLAGS="--xla_backend_optimization_level=0 \
  --xla_cpu_parallel_codegen_split_count=1 $(EMITTERS)"

.PHONY: demo test lint clean
.PHONY: test-slow test-sweeps test-faults test-peers test-compilers test-gpu

demo: .venv/.runtime
	$(RUN) train.py --config=configs/numbers.py --workdir=runs/demo
	$(RUN) eval.py --workdir=runs/demo --split=test --show=10
	$(RUN) heads.py plot --workdir=runs/demo --split=test --site=cross \
	  --output=runs/demo/cross_attention.png

test: lint
	$(QUICK) $(RUN) -m pytest -n 2 --dist worksteal -m "not slow"

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# Every merge rule, preset, mesh and ablation in whole models, and the tests of the
# other folders that are marked slow: minutes of compiling.
test-slow: .venv/.dev
	$(QUICK) $(RUN) -m pytest -n 2 --dist worksteal -m slow \
	  -o norecursedirs=".* compilers peers gpu faults sweeps"

# Training that is killed, signalled and short of disk, again and again: minutes.
test-faults: .venv/.dev
	$(QUICK) $(RUN) -m pytest -n 2 --dist loadfile tests/faults

# Whole sweeps, killed, shared, on Ray and submitit, their report in a browser: minutes.
test-sweeps: .venv-sweeps/.installed
	$(QUICK) .venv-sweeps/bin/python -m pytest -n 2 --dist loadfile tests/sweeps

# Beside PyTorch, transformers, x-transformers and CTranslate2, in an environment of its own.
test-peers: .venv-peers/.installed
	$(QUICK) .venv-peers/bin/python -m pytest -n 2 --dist loadfile tests/peers

# By the compilers for TPUs and NVIDIA GPUs, which need neither.
test-compilers: .venv-compilers/.installed
	JAX_PLATFORMS=cpu .venv-compilers/bin/python -m pytest -n 2 --dist worksteal \
	  tests/compilers

# On an NVIDIA GPU, once `.venv` has jax[cuda13]; the other suites mean the CPU.
test-gpu: .venv/.dev
	JAX_PLATFORMS= $(RUN) -m pytest -o addopts= tests/gpu

.venv/.runtime: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -e ".[lab]"
	touch $@

.venv/.dev: requirements-dev.txt .venv/.runtime
	.venv/bin/pip install --quiet -r requirements-dev.txt
	touch $@

# The others see the packages of .venv, and add to them.
SITE = python -c "import site; print(site.getsitepackages()[0])"
.venv-%/.installed: requirements-%.txt .venv/.dev
	$(PYTHON) -m venv .venv-$*
	base=$$(.venv/bin/$(SITE)) && own=$$(.venv-$*/bin/$(SITE)) && \
	  echo "import site; site.addsitedir('$$base')" > $$own/base.pth
	.venv-$*/bin/pip install --quiet -r requirements-$*.txt
	touch $@

clean:
	rm -rf .venv .venv-* runs .cache
