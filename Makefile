# overfence: `make help` lists the targets. Needs GNU make and bash.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# rustup puts cargo here, also where no login shell has read its profile.
export PATH := $(HOME)/.cargo/bin:$(PATH)
# Set to 1 to install nothing; see packaging/setup.sh.
export NO_INSTALL

PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
# Tests measure times on real freezes: as many at once as a small host bears.
TEST_THREADS ?= 2
# The guest's: 6.1, 6.12 or newest; see vm-harness/README.md.
KERNEL ?= 6.1
SUITE ?= all
# How often its power is cut.
CUTS ?= 5
# Property tests draw from this seed, so that a run can be repeated; give another one to draw others.
export PROPTEST_RNG_SEED ?= 20261129
RELEASE := $(or $(CARGO_TARGET_DIR),target)/release/overfence

.PHONY: help demo test bench fuzz check fmt clippy doc named-tests deny alerts build install deb vm vm-matrix power-cut

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo
	@echo 'NO_INSTALL=1 installs nothing and says what is missing.'

demo: ## Run the stale-writer story on real mounts and cgroups (root)
	@packaging/setup.sh run
	cargo build --release --locked
	$(RELEASE) demo

test: ## Run all tests; without root the privileged suite is left out, loudly
	@packaging/setup.sh test
	cargo test --locked --lib --bins -- --test-threads=$(TEST_THREADS)
	cargo test --locked --doc -- --test-threads=$(TEST_THREADS)
	@if [ "$$(id -u)" = 0 ]; then \
		set -x; cargo test --locked --test privileged -- --test-threads=$(TEST_THREADS); \
	else \
		cargo test --locked --test privileged --no-run; \
		echo; \
		echo '*** NOT ROOT: the privileged suite (real mounts, cgroups, namespaces) was NOT run. ***'; \
		echo '*** Run `make test` as root to run everything.                                    ***'; \
	fi

vm: ## Run doctor, demo and the privileged suite in a Debian guest, KERNEL=6.1 (root)
	vm-harness/run --kernel $(KERNEL) --suite $(SUITE)

vm-matrix: ## The same on each kernel: 6.1, 6.12 and the newest that Debian has
	@failed=; vm-harness/selftest || failed=" selftest"; for kernel in 6.1 6.12 newest; do \
		vm-harness/run --kernel $$kernel || failed="$$failed $$kernel"; \
	done; [ -z "$$failed" ] || { echo "*** FAILED:$$failed ***"; exit 1; }

power-cut: ## Cut a guest's power CUTS times (5) at work, and look what holds, KERNEL=6.1 (root)
	vm-harness/run --kernel $(KERNEL) --power-cut $(CUTS)

bench: ## Measure against bare system calls and container engines in the same run (root)
	@packaging/setup.sh bench
	cargo bench --locked --bench '*'

fuzz: ## Fuzz each parser for FUZZ_SECONDS (60); needs cargo-fuzz and a C++ compiler, no nightly Rust
	@command -v cargo-fuzz >/dev/null || { \
		echo 'overfence: cargo-fuzz is missing: run cargo install --locked cargo-fuzz' >&2; exit 1; }
	@command -v c++ >/dev/null || { \
		echo 'overfence: a C++ compiler is missing: run apt-get install g++' >&2; exit 1; }
	# The address sanitizer alone would want nightly; the parsers are safe Rust, panics are what is sought.
	fuzz/seeds
	for target in $$(cargo fuzz list); do \
		cargo fuzz run --sanitizer none "$$target" -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

check: fmt clippy doc named-tests alerts deny ## Formatting, lints, docs, alert rules, licences and sources of crates

fmt:
	cargo fmt --check

clippy:
	cargo clippy --locked --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items

named-tests:
	.ci/named-tests

alerts: ## Check the alert rules and run their tests, with promtool
	@code=0; packaging/promtool.sh --version >/dev/null || code=$$?; \
	if [ $$code = 69 ]; then \
		echo '*** promtool could NOT be had: the alert rules were NOT checked.              ***'; \
		[ "$(NO_INSTALL)" = 1 ]; \
	else \
		set -x; \
		packaging/promtool.sh check rules packaging/prometheus/overfence.rules.yml; \
		packaging/promtool.sh test rules packaging/prometheus/overfence.rules.test.yml; \
	fi

deny:
	@if command -v cargo-deny >/dev/null; then \
		set -x; cargo deny --log-level error --all-features check bans licenses sources; \
	else \
		echo '*** cargo-deny is NOT installed: licences, bans and sources were NOT checked. ***'; \
		echo '*** Run `cargo install --locked cargo-deny`, or .ci/run, which does it.       ***'; \
	fi

build: ## Build the release binary
	@packaging/setup.sh build
	cargo build --release --locked

install: build ## Install binary, units, man pages, completions below PREFIX (/usr/local), with DESTDIR before it
	packaging/install.sh $(RELEASE) "$(DESTDIR)" $(PREFIX)

deb: build ## Pack the release binary as target/debian/overfence_*.deb
	packaging/deb.sh $(RELEASE) target/debian
