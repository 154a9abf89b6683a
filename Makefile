# The front door. `make train` and `make test` set up what is missing, build, and run.
PRESET ?= release
BUILD  := build
ifneq ($(PRESET),release)
BUILD  := build-$(PRESET)
endif
PREFIX ?= /usr/local
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help setup build train test wheel package bench docs format lint install clean
help:            ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile
setup:           ## Install what the build needs (Debian packages, a virtual environment with torch)
	@scripts/setup.sh
build: setup     ## Build the library, the binary, the examples and the tests
	@scripts/build.sh $(PRESET) $(JOBS)
train: setup     ## Train the MLP with 2 processes on the built-in digits; builds only what that needs
	@scripts/build.sh $(PRESET) $(JOBS) lockstep_bin
	@$(BUILD)/bin/lockstep train --model mlp --dataset digits --devices 2
test: build      ## Run all tests
	@scripts/setup.sh --test
	@scripts/test.sh $(BUILD) $(JOBS)
wheel: setup     ## Build the Python wheel into build/wheel, against the torch of .venv or of an active environment
	@scripts/setup.sh --test
	@scripts/wheel.sh $(JOBS)
package: setup   ## Build a .deb and a tar.gz into build/package
	@scripts/package.sh $(JOBS)
bench: build     ## Measure against Python and print the ratios
	@scripts/bench.sh $(BUILD)
docs:            ## Make one site of the pages and the public headers in build/docs
	@scripts/setup.sh --docs
	@scripts/docs.sh
format:    ## Format the C++ files with clang-format
	@scripts/setup.sh --dev
	@git ls-files '*.h' '*.cpp' | grep -v gloo_stubs | xargs clang-format -i
lint: setup      ## Check the C++ files with clang-format and clang-tidy
	@scripts/lint.sh
install: setup   ## Install the library and the binary: make install PREFIX=/usr/local
	@scripts/build.sh $(PRESET) $(JOBS) lockstep_bin lockstep_bench lockstep_hosts lockstep_rpc_library
	@cmake --install $(BUILD) --prefix $(PREFIX)
clean:           ## Remove the build folders
	@rm -rf build build-dev build-debug build-asan build-tsan
