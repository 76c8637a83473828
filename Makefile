# Every target sets itself up on a machine that has only make and Python 3.11 or newer.

# Where Python may keep no bytecode, each of a run's dozen processes compiles all that it imports, for a second or two.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN_READY := $(VENV)/.ready-run
BENCH_READY := $(VENV)/.ready-bench
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
USED := $(or $(PYTHON),python3)

DEMO ?= --world 4 --spares 1 --seed 33 --chaos storm --twin --config examples/demo.toml
BENCHMARKS ?= recovery hosts flips partition floor garbage storm reduction reconfigure encrypted machine snapshot simulate store detect straggler scrape account elastic autoscaled price mesh tensor exposed device
BENCH_FLAGS ?= --quick
# The newest commit that is a day old.
BASE ?= $(shell git rev-list -1 --before='1 day ago' HEAD 2>/dev/null)
PACE_FLAGS ?= --json runs/bench/pace.json
OTHER := .venv-other
NEWEST := .venv-newest
BENCHED ?= runs/bench
VERSIONS ?= torch==2.11.0 torch
SEEDS ?= 10000
TIMES ?= 20
TOOLS := chromium prometheus fonts-dejavu-core iproute2 util-linux mount procps faketime nftables openssh-client dropbear-bin rsync

# Which tests a tier has is in tests/tiers.py. Each suite says at the end how long it took, and what it left out.
OF = $$($(BIN)/python -m tests.tiers $(1))
PYTEST = $(BIN)/python -m pytest --durations=12 --durations-min=20 --tier
SPREAD := -n logical --maxprocesses 8
BY_FILE := -n logical --maxprocesses 2 --dist loadfile --no-loadscope-reorder
TOOK := $(VENV)/took.txt
LEFT_OUT := $(VENV)/left-out.txt
suite = @: >$(LEFT_OUT); export FLEET_LEFT_OUT=$(abspath $(LEFT_OUT)); began=$$(date +%s); set -x; $(2); rc=$$?; set +x; \
	echo "$(1): $$(($$(date +%s) - began)) s" | tee -a $(TOOK); $(BIN)/python -m tests.support.programs $(LEFT_OUT); exit $$rc

# Parts of `make nightly`, which are run one by one, too: `make night-hosts`. One that has passed at this very commit is not run again.
PARTS := seeds products shown benchmarks hosts pace
PASSED := runs/nightly/$(shell git describe --always --abbrev=40 --exclude='*' --dirty=-$$(date +%s) 2>/dev/null)

.PHONY: tools demo test processes hosts stress replay experiments lint docs bench bench-newest pace nightly device versions clean $(PARTS:%=night-%)
.DEFAULT_GOAL := test

# Sets up what a run needs, and no more.
demo: $(RUN_READY)
	$(BIN)/python examples/demo.py $(DEMO)

# What to run before each change: no cluster is started. Some ten minutes on two cores.
test: lint tools
	$(call suite,test,$(PYTEST) test $(SPREAD) $(call OF,test))

# Real processes and Ray clusters, file by file.
processes: $(READY) tools
	$(call suite,processes,$(PYTEST) processes $(BY_FILE) $(call OF,processes))

# Ray on several hosts, which are namespaces of this machine: root is needed.
hosts: $(READY) tools
	$(call suite,hosts,$(PYTEST) hosts $(call OF,hosts))

# The same tests again and again, beside a load on all cores: make stress TESTS="tests/fault/test_drain.py" TIMES=20
stress: $(READY) tools
	$(BIN)/python -m tests.support.stress $(TESTS) --times $(TIMES)

# Whether this checkout decides as commit BASE does: for a refactoring.
replay: $(READY)
	$(BIN)/python -m tests.replay "$(BASE)"

# The experiments of experiments/ on such hosts, each to its verdicts.
experiments: $(READY) tools
	mkdir -p runs
	$(BIN)/python -m tests.support.experiments --json runs/experiments.json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(BENCH_READY)
	mkdir -p $(BENCHED)
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(BENCH_FLAGS) --json $(BENCHED)/$$name.json || exit 1; done

# The same with the newest PyTorch, and the torchft of last night: make bench-newest BENCHMARKS=mesh BENCH_FLAGS=
bench-newest: BENCHMARKS := recovery hosts mesh reconfigure
bench-newest: tools
	$(MAKE) VENV=$(NEWEST) $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade torch torchft-nightly
	touch $(NEWEST)/.ready-bench
	$(MAKE) VENV=$(NEWEST) BENCHED=runs/bench/newest BENCHMARKS="$(BENCHMARKS)" bench

# Whether this checkout is slower than commit BASE: both run in turn. Half an hour; PACE_FLAGS="--only pace4 --launches 2" is a part of it.
pace: $(READY)
	mkdir -p runs/bench
	$(BIN)/python -m benchmarks.pace "$(BASE)" $(PACE_FLAGS)

# What is too long for each change. It goes on where it was stopped: parts that passed at this commit are not run again.
nightly: $(PARTS:%=$(PASSED)/%)

$(PASSED)/%: | $(READY) tools
	$(MAKE) night-$*
	@mkdir -p $(@D) && tail -n 1 $(TOOK) >$@

night-seeds: export FLEET_SEEDS = $(SEEDS)
night-seeds: export FLEET_PROBES = $(abspath runs/probes)
night-seeds: $(READY)
	rm -rf runs/probes
	$(call suite,night-seeds,$(PYTEST) test $(SPREAD) tests/simulation/test_seeds.py tests/unit/test_fleet_simulation.py && $(PYTEST) seeds $(SPREAD) $(call OF,seeds) \
	  && $(BIN)/python -m tests.simulation.probes runs/probes)

night-products night-shown night-benchmarks: night-%: $(BENCH_READY) tools
	$(call suite,night-$*,$(PYTEST) $* $(BY_FILE) $(call OF,$*))

night-hosts: $(BENCH_READY) tools
	$(call suite,night-hosts,$(PYTEST) night-hosts $(call OF,night-hosts))

night-pace: $(READY)
	$(call suite,night-pace,$(MAKE) pace PACE_FLAGS="--launches 1 --json runs/bench/pace.json")

# What needs a GPU. Nothing is set up for it: a Python with torch for CUDA and Fleet's small dependencies is enough, Ray is not used.
device:
	mkdir -p runs/bench
	failed=0; $(USED) -m tests.contract.communicators --device || failed=1; \
	$(USED) -m benchmarks.device $(DEVICE_FLAGS) --json runs/bench/device.json || failed=1; exit $$failed

# What needs no cluster, with the oldest and the newest PyTorch that is promised, or with another Ray (docs/upgrading.md), each in turn.
versions:
	$(MAKE) VENV=$(OTHER) $(OTHER)/.ready
	for wanted in $(VERSIONS); do \
	  $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "$$wanted" \
	    && $(OTHER)/bin/python -m pytest --tier test $(SPREAD) $(call OF,test) && $(OTHER)/bin/python -m pytest tests/contract/test_ray_facts.py \
	    || exit 1; done

# Tests whose program cannot be installed are left out, and told at the end. CI has all of them.
tools:
	@command -v chromium >/dev/null && command -v promtool >/dev/null && command -v prometheus >/dev/null && command -v ip >/dev/null && command -v faketime >/dev/null && command -v nft >/dev/null \
	  && command -v dropbear >/dev/null && command -v ssh >/dev/null && command -v rsync >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(TOOLS) >/dev/null; } \
	  || { echo "Some tests need these programs: apt-get install $(TOOLS)" >&2; test -z "$$CI"; }

clean:
	rm -rf $(VENV) $(OTHER) $(NEWEST) runs build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_READY): requirements-dev.txt pyproject.toml actors/rank/state/_stream.c
	@$(USED) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Fleet needs Python 3.11 or newer, and '$(USED)' is" \
	  "$$($(USED) -c 'import platform; print(platform.python_version())' 2>/dev/null || echo 'not a Python that runs')." \
	  "Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(USED) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(USED) -m venv' failed: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	sed 's/\[[^]]*\]//' requirements-dev.txt >$(VENV)/constraints.txt  # pip takes no extras in constraints
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt --no-compile --no-build-isolation -e .
	$(BIN)/python -c 'import importlib, actors.hosts; [importlib.import_module(name) for name in actors.hosts.IMPORTED]'  # compiles them
	@touch $@

# The file names all that is needed: nothing is left to be resolved, and two halves are unpacked at a time. Few modules are imported, so
# none is compiled ahead.
$(READY): $(RUN_READY)
	split -n r/2 requirements-dev.txt $(VENV)/half-
	ls $(VENV)/half-* | xargs -n 1 -P 2 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r
	$(BIN)/python -m pip check
	@touch $@

$(BENCH_READY): $(READY)
	for peer in torchft==0.2.0 nvidia-resiliency-ext mlsysim==0.3.0 simpy; do \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check "$$peer" -c $(VENV)/constraints.txt \
	    || echo "$$peer cannot be installed here: its figures will be left out"; done
	@touch $@
