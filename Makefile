# ip-masq: build, test, lint. `make help` lists the targets.

VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
FUZZTIME  ?= 1m
TESTFLAGS ?= $(if $(CI),-v)

# What the tests run beside our own binaries. Packages, not programs: see tools/debian-packages.
PACKAGES := iptables nftables conntrack iproute2

BUILD       := go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)"
RECONCILER  := $(wildcard reconciler/*.go)
CNI_TOOLS   := bin/cni/.built
LINTER      := bin/lint/golangci-lint
SCRIPTS      = $(shell find .ci tools -type f -perm -u+x)

# Tests that have targets of their own; see their doc.go.
SUITES := e2e_runtimes,e2e_cluster

# Static binaries, and no C compiler needed.
export CGO_ENABLED := 0
# Where tests and the demo find the binaries.
export IPMASQ_BIN_DIR := $(CURDIR)/bin
# iptables and nft are in sbin, which is not in everybody's PATH.
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help build test lint fuzz demo bench e2e-runtimes e2e-cluster packages clean

help: ## list the targets
	@grep -hE '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9 -]+):.*## /\1\t/' | expand -t 34

build: ## static binaries in bin/
	$(BUILD) -o bin/ip-masq ./plugin
ifneq ($(RECONCILER),)
	$(BUILD) -o bin/ip-masq-reconciler ./reconciler
endif

# -count=1: a cached result says nothing about this kernel, nor about a program in bin/ that changed.
test: packages build $(CNI_TOOLS) ## every test, those on the kernel too (TESTFLAGS=-v)
	go test -count=1 -timeout 20m $(TESTFLAGS) ./...

lint: $(LINTER) ## format, vet, go.mod, scripts, golangci-lint
	@out=$$(gofmt -s -l .); test -z "$$out" || { printf 'gofmt -s -w is needed for:\n%s\n' "$$out" >&2; exit 1; }
	go vet -tags $(SUITES) ./...
	go mod tidy -diff
	@for script in $(SCRIPTS); do echo "bash -n $$script"; bash -n "$$script" || exit 1; done
	$(LINTER) run ./...

fuzz: ## each fuzz target for FUZZTIME (1m)
	tools/fuzz $(FUZZTIME)

demo: packages build $(CNI_TOOLS) ## pods, a LAN and an outside in namespaces: who saw which address, and why
	go run ./e2e/demo

bench e2e-runtimes e2e-cluster: ## not built yet
	@echo "make $@: not built yet" >&2; exit 1

packages: ## programs that the tests run (root on Debian: installs them)
	@tools/debian-packages $(PACKAGES)

clean: ## remove bin/
	rm -rf bin

# Tools are pinned in modules of their own, so that the project does not depend on what they depend on.
$(CNI_TOOLS): tools/cni/go.mod tools/cni/go.sum
	go -C tools/cni build -trimpath -ldflags "-s -w" -o $(CURDIR)/bin/cni/ tool
	@touch $@

$(LINTER): tools/lint/go.mod tools/lint/go.sum
	go -C tools/lint build -trimpath -ldflags "-s -w" -o $(CURDIR)/$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@
