# Each chore is one command; `make help` lists them. All but `setup` and `clean` set up first.
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
READY := .venv/.ready-test
RUN := .venv/.ready-run
ARGS ?=
MINUTES ?= 5
PAGES := $(wildcard *.md docs/*.md docs/*/*.md bench/*.md bench/*/*.md) traces/README.md
# One more than processors: some tests wait.
JOBS ?= $(shell expr $$(nproc) + 1)

CASES ?= $(wildcard $(or $(DPUFLOW_SHARED),../shared)/captures/tcp/* $(or $(DPUFLOW_SHARED),../shared)/captures/roce/*)

# The system and processor that `make deb` is for: this machine's, if it is one of those there are packages for.
RELEASE ?= $(shell . /etc/os-release; echo $$VERSION_CODENAME)
ARCH ?= $(shell dpkg --print-architecture)

.PHONY: gallery help setup setup-run setup-live demo test test-long tests-others tests-live fuzz soak boundscheck check lint types format bench \
	bench-accuracy bench-robustness conditions \
	score help-text docs headers bpf doca dist wheel deb deb-check lock test-all test-pythons clean

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-15s %s\n' "$$name" "$$what"; done

$(READY): setup.cfg pyproject.toml tools/setup.sh $(wildcard tools/lock/*.txt)
	@sh tools/setup.sh test

$(RUN): setup.cfg pyproject.toml tools/setup.sh tools/lock/run.txt
	@sh tools/setup.sh run

setup: ## make .venv with dpuflow in it, install what tests and bench need, compile the kernels
	@sh tools/setup.sh test

setup-run: ## make .venv with just what `dpuflow analyze` needs: no root, no packages of the distribution
	@sh tools/setup.sh run

setup-live: ## the same, and what live capture needs (as root: clang, libbpf, bcc)
	@sh tools/setup.sh live

# Nothing compiles for the demo's sake: where nothing is compiled, plain Python does, without starting that.
demo: $(RUN) ## analyse a bundled capture of a job with one late rank and print the verdict
	@mkdir -p build
	$(if $(wildcard .venv/.ready-test .venv/.ready-live),,DPUFLOW_PLAIN=1 )$(PYTHON) -m dpuflow analyze traces/gloo-allreduce-n4/node*.pcap.gz --json build/demo.json
	@echo
	@echo "The whole result is in $(CURDIR)/build/demo.json"

test: $(READY) ## run the tests but the long ones, the ten slowest named at the end (ARGS="-k name" picks some)
	@$(MAKE) --no-print-directory -j 1 -k LONG="not long" tests-others tests-live

test-long: $(READY) ## run the long tests: fuzzing, many random inputs, whole jobs, a long-running agent
	@$(MAKE) --no-print-directory -j 1 -k LONG=long tests-others tests-live

# Tests start Python some hundred times: what it compiles is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# One after the other: an agent that keeps to a share of a processor is not tested beside others. Live tests mostly
# wait, so more of them than processors; the long ones measure, so no more. 5: none is left.
LIVE = $(if $(filter not,$(LONG)),-n 4 --dist worksteal,-n 2 --dist loadfile)
tests-others:
	$(PYTHON) -m pytest -m "$(LONG)" -n $(JOBS) --dist worksteal --durations=10 --ignore=tests/root $(ARGS) || [ $$? = 5 ]

tests-live:
	$(PYTHON) -m pytest -m "$(LONG)" $(LIVE) --durations=10 tests/root $(ARGS) || [ $$? = 5 ]

test-all: test test-long boundscheck ## run all tests, those of kernels also with every index checked

test-pythons: ## run the tests with the lowest and the highest Python here (ARGS="tests/test_cli.py" picks some)
	sh tools/pythons.sh -m "not long" $(ARGS)

fuzz: $(READY) ## damaged input for MINUTES minutes, then C targets for half as long (libFuzzer where clang has it)
	$(PYTHON) tools/fuzz.py --minutes $(MINUTES) $(ARGS)
	PYTHON=$(PYTHON) sh tools/fuzz.sh $$(($(MINUTES) * 6))

soak: $(READY) ## an agent for long: HOURS=6 of packets in fast time, or as root MINUTES=n of real time (memory, CPU)
	$(PYTHON) tools/soak.py $(if $(filter command line,$(origin MINUTES)),$(MINUTES) --flap,--fast $(or $(HOURS),6)) $(ARGS)

boundscheck: $(READY) ## the tests of kernels with every index checked (minutes: all kernels are compiled anew)
	NUMBA_BOUNDSCHECK=1 DPUFLOW_NUMBA=1 NUMBA_CACHE_DIR=$(CURDIR)/build/boundscheck \
		$(PYTHON) -m pytest -q $(or $(CORE),tests/test_tcp.py tests/test_roce.py tests/test_parse_runs.py \
		tests/test_fuzz_found.py tests/test_fuzz_reader.py tests/test_stream_kernels.py tests/test_malformed.py)

check: lint types test ## all that a change must pass: lint, format, types, tests

lint: $(READY) ## ruff: rules and format; pages wrapped
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) tools/wrap.py --check $(PAGES)

types: $(READY) ## mypy, strict
	$(PYTHON) -m mypy

format: $(READY) ## rewrite the files as ruff formats them, wrap the pages
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(PYTHON) tools/wrap.py $(PAGES)

bench: $(READY) ## speed against the peers, as ratios of CPU time (minutes)
	$(PYTHON) -m bench $(ARGS)

bench-accuracy: $(READY) ## accuracy on 200 scripted jobs drawn at random, and on the real captures (minutes)
	$(PYTHON) -m bench.accuracy --count 200 $(ARGS)

conditions: $(READY) ## conditions put into 300 scripted jobs against those found (an hour; ARGS="--count 30 --cases")
	$(PYTHON) -m bench.conditions $(ARGS)

bench-robustness: $(READY) ## verdicts on twins of captures: late stamps, lost packets, missing nodes (minutes)
	$(PYTHON) -m bench.robustness --jobs 2 $(ARGS)

score: $(READY) ## analyse the captures with known truth (CASES="folders") and score the results
	$(PYTHON) tools/score_cases.py $(CASES) $(ARGS)

gallery: $(RUN) ## make the pictures of docs/gallery.md again (chromium)
	sh tools/gallery.sh

help-text: $(READY) ## write help.txt, manual pages and completions again after a change to commands or options
	$(PYTHON) -m dpuflow.cli.helptext
	$(PYTHON) -m dpuflow.cli.manpages

docs: $(READY) ## write docs/runbook.md and docs/theory/rules.md again after a change to conditions or rules
	$(PYTHON) -m dpuflow.conditions.describe
	$(PYTHON) -m bench.ablation.describe

headers: $(READY) ## write bpf/dpuflow_schema.h again after a change to dpuflow/schema/ring.py
	$(PYTHON) -m dpuflow.schema.c_header

bpf: ## compile the eBPF programs into dpuflow/live/ (clang, libbpf-dev)
	sh tools/bpf.sh

doca: ## compile the DOCA adapter for --backend doca, on the card, against its own DOCA SDK
	$(MAKE) -C doca_bindings
	cp doca_bindings/libdpuflow_doca.so dpuflow/live/

dist: $(READY) bpf ## build a wheel into dist/, with compiled kernels for any processor of this machine's kind
	$(PYTHON) -m dpuflow.kernels._build
	@$(MAKE) --no-print-directory wheel

# The same sources give the same bytes: in a folder of its own, so that neither what older builds left nor the umask
# gets in, and with the time of the last commit.
WHEEL := build/wheel
wheel:
	rm -rf $(WHEEL) && mkdir -p $(WHEEL)
	git ls-files -z dpuflow docs deploy bpf setup.cfg pyproject.toml README.md LICENSE | xargs -0 cp --parents -t $(WHEEL)
	find dpuflow \( -name 'shipped-*.so' -o -name '*.bpf.o' -o -name libdpuflow_doca.so \) -exec cp --parents -t $(WHEEL) {} +
	chmod -R u=rwX,go=rX $(WHEEL)
	umask 022; SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
		$(PYTHON) -m pip wheel -q --no-deps --no-build-isolation -w dist $(WHEEL)

lock: $(READY) ## renew tools/lock/: what setup.cfg's ranges come to today, with hashes
	sh tools/lock.sh

deb: $(READY) ## build a Debian package into dist/ (RELEASE=jammy, noble or bookworm; ARCH=amd64 or arm64)
	sh tools/deb.sh $(RELEASE) $(ARCH)

deb-check: deb ## as root: install that package here, start the service as its unit would, remove it, look what is left
	DPUFLOW_DEB="$$(ls dist/dpuflow_*~$(RELEASE)_$(ARCH).deb)" $(PYTHON) -m pytest tests/root/test_deb.py $(ARGS)

clean: ## remove .venv and everything that was built
	rm -f dpuflow/live/*.bpf.o dpuflow/live/libdpuflow_doca.so
	$(MAKE) -s -C doca_bindings clean
	rm -rf .venv build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
