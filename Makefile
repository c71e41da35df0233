# ip-masq: build, test, lint. `make help` lists the targets.

# Recipes have it as text, and the name of a tag can have any character of the shell.
VERSION   ?= $(shell { git describe --tags --always --dirty 2>/dev/null || echo dev; } | tr -cd '0-9A-Za-z._-')
# The time of what has one, so that two builds of a commit are equal.
COMMIT_TIME = $(shell git log -1 --format=%ct)
FUZZTIME  ?= 1m
TESTFLAGS ?= $(if $(CI),-v)

# What the tests run beside the binaries of this project. Packages, not programs: see tools/debian-packages.
PACKAGES := iptables nftables conntrack iproute2

# The plugin takes its version from package buildversion, as the reference plugins do.
STAMP       := -X main.version=$(VERSION) -X github.com/containernetworking/plugins/pkg/utils/buildversion.BuildVersion=$(VERSION)
BUILD       := go build -ldflags "-s -w $(STAMP)"
CNI_TOOLS   := bin/cni/.built
DEPLOY_TOOLS = bin/deploy/.built
LINTERS     := bin/lint/.built
RELEASE     := bin/release/release
READINESS   := bin/readiness/.built
# A release, and the key that signs it, as `minisign -G -W` makes one. Without a key nothing is signed.
DIST        ?= dist
SIGNING_KEY ?=
# The key that must have signed a release.
PUBLIC_KEY  ?= ip-masq.pub
# The Debian packages of the image with iptables: fetched once, and then used without a network.
DEBS        ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ip-masq-cni/debian-packages
# The container images: what `make image` calls them, and for what machines they are.
IMAGE       ?= ghcr.io/ip-masq/ip-masq-cni
ARCHES      := amd64 arm64 s390x
SCRIPTS      = $(shell find .ci tools -type f -perm -u+x)
DOCUMENTS    = $(shell find . \( -path ./.git -o -path ./bin -o -path ./dist -o -name testdata \) -prune -o -name '*.md' -print)

# Tests that have targets of their own; see their doc.go.
SUITES := e2e_runtimes,e2e_cluster,e2e_kernels,e2e_packages,e2e_readiness,e2e_kubernetes
# Prints where containerd is, which is built once, without what needs C.
CONTAINERD := tools/cached containerd -tags no_btrfs,no_aufs,no_zfs,no_devmapper,no_tracing

# Static binaries, and no C compiler needed.
export CGO_ENABLED := 0
# Where tests and the demo find the binaries.
export IPMASQ_BIN_DIR := $(CURDIR)/bin
# What is built is the same in every directory, so that tests compile nothing that `make build` or another clone compiled.
export GOFLAGS := $(GOFLAGS) -trimpath
# iptables and nft are in sbin, which is not in every PATH.
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help build test test-time test-one lint fuzz demo bench e2e-runtimes e2e-cluster e2e-readiness e2e-kubernetes e2e-kernels image image-iptables man release verify release-test e2e-packages imitations promtool packages clean

help: ## list the targets
	@grep -hE '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9 -]+):.*## /\1\t/' | expand -t 34

build: ## static binaries in bin/
	$(BUILD) -o bin/ip-masq ./plugin
	$(BUILD) -o bin/ip-masq-reconciler ./reconciler

test: PACKAGES += minisign
test: test-time packages build $(CNI_TOOLS) $(DEPLOY_TOOLS) ## every test, those on the kernel too (TESTFLAGS=-v)
	@go run ./e2e/alltests $(TESTFLAGS)

test-time:
	@echo "test: every test of every module: about 5.5 minutes on two cores; the first time 4 more to build tools"

# IN is the directory of the test, if several tests have the name, or it is below tools/.
test-one: PACKAGES += $(if $(filter tools/release,$(IN)),minisign)
test-one: packages build $(CNI_TOOLS) $(DEPLOY_TOOLS) ## one test, by its name (TEST=TestFlapping; IN=e2e TEST=TestKeys/nftables)
	@in="$(IN)"; file=$$(test -n "$$in" || grep -rlE --include='*_test.go' '^func $(firstword $(subst /, ,$(TEST)))\(' \
			conflist-examples deploy docs e2e pkg plugin reconciler | head -n 1); \
		test -n "$$in$$file" || { echo "no test is named $(TEST)" >&2; exit 1; }; \
		go -C "$${in:-$$(dirname "$$file")}" test -tags $(SUITES) -count=1 -v -run '^$(subst /,$$/^,$(TEST))$$' . $(TESTFLAGS)

lint: $(LINTERS) ## format, vet, go.mod, scripts, workflows, words, prose, golangci-lint
	@out=$$(gofmt -s -l .); test -z "$$out" || { printf 'gofmt -s -w is needed for:\n%s\n' "$$out" >&2; exit 1; }
	go vet -tags $(SUITES),man ./...
	@for module in . tools/bench tools/cilium tools/cni tools/deploy tools/release; do \
		echo "$$module: go vet, go mod tidy"; go -C $$module vet -tags promtool ./... && go -C $$module mod tidy -diff || exit 1; done
	@for script in $(SCRIPTS); do echo "bash -n $$script"; bash -n "$$script" || exit 1; done
	bin/lint/actionlint -shellcheck= -pyflakes=
	@! grep -rn 'uses:' .github/workflows | grep -vE '@[0-9a-f]{40} # v' || { echo 'pin actions by the hash of a commit' >&2; exit 1; }
	tools/words
	bin/lint/vale --config=tools/vale/vale.ini --output=line $(DOCUMENTS)
	bin/lint/golangci-lint run ./...

fuzz: ## each fuzz target for FUZZTIME (1m)
	tools/fuzz $(FUZZTIME)

demo: packages build $(CNI_TOOLS) ## pods, a LAN and an outside in namespaces: who saw which address, and why
	go run ./e2e/demo

# Two releases: the one that the manifests name, and the next, to upgrade to.
e2e-cluster: PACKAGES := etcd-server containerd runc busybox-static iptables nftables conntrack iproute2
e2e-cluster: packages build $(CNI_TOOLS) $(DEPLOY_TOOLS) ## whole Kubernetes clusters: DaemonSets rolled out, upgraded, taken away (root)
	@echo "e2e-cluster: about 12 minutes on two cores; the first time 13 more to build Kubernetes, containerd, flannel and a part of Cilium"
	for release in v0.1.0 v0.1.1; do $(MAKE) image image-iptables VERSION=$$release ARCHES=$$(go env GOARCH) || exit 1; done
	kubernetes=$$(tools/cached kubernetes) && containerd=$$($(CONTAINERD)) && flannel=$$(tools/cached flannel) && cilium=$$(tools/cached cilium) && \
		IPMASQ_IMAGE_DIR=$(CURDIR)/bin/image IPMASQ_KUBERNETES_DIR=$$kubernetes IPMASQ_CONTAINERD_DIR=$$containerd IPMASQ_FLANNEL_DIR=$$flannel IPMASQ_CILIUM_DIR=$$cilium \
		go test -tags e2e_cluster -count=1 -p 1 -timeout $$(go run ./e2e/timelimit/scale 30m) $(TESTFLAGS) ./e2e/cluster/... ./e2e/mainplugins/...

# CLONES has the repositories of node-readiness-controller and node-problem-detector; see tools/node-readiness.
e2e-readiness: PACKAGES := git etcd-server containerd runc busybox-static iptables nftables conntrack iproute2
e2e-readiness: packages build $(CNI_TOOLS) $(DEPLOY_TOOLS) $(READINESS) ## nodes that get pods only when ip-masq is ready: the real controllers (root)
	@echo "e2e-readiness: about 2 minutes on two cores; the first time 15 more to build the controllers, Kubernetes and containerd"
	$(MAKE) image VERSION=v0.1.0 ARCHES=$$(go env GOARCH) && $(MAKE) image-iptables VERSION=v0.1.0 ARCHES=$$(go env GOARCH)
	kubernetes=$$(tools/cached kubernetes) && containerd=$$($(CONTAINERD)) && \
		IPMASQ_IMAGE_DIR=$(CURDIR)/bin/image IPMASQ_KUBERNETES_DIR=$$kubernetes IPMASQ_CONTAINERD_DIR=$$containerd IPMASQ_READINESS_DIR=$(CURDIR)/bin/readiness \
		go test -tags e2e_cluster,e2e_readiness -count=1 -timeout $$(go run ./e2e/timelimit/scale 20m) -run '^TestNode(Readiness|ProblemDetector)$$' ./e2e/cluster $(TESTFLAGS)

# The output and the reports of the tests are in bin/sig-network. One cluster with TESTFLAGS='-run TestNetworkTests/nftables$$'.
e2e-kubernetes: PACKAGES := etcd-server containerd runc busybox-static iptables nftables conntrack iproute2 bind9-dnsutils curl netcat-openbsd wget
e2e-kubernetes: packages build $(CNI_TOOLS) $(DEPLOY_TOOLS) ## the network tests of Kubernetes, unmodified, with and without ip-masq (root)
	@echo "e2e-kubernetes: about 60 minutes on two cores; the first time 25 more to build the tests, Kubernetes, containerd and CoreDNS"
	$(MAKE) image VERSION=v0.1.0 ARCHES=$$(go env GOARCH) && $(MAKE) image-iptables VERSION=v0.1.0 ARCHES=$$(go env GOARCH)
	kubernetes=$$(tools/cached kubernetes) && containerd=$$($(CONTAINERD)) && tests=$$(tools/cached sig-network) && coredns=$$(tools/cached coredns) && \
		IPMASQ_IMAGE_DIR=$(CURDIR)/bin/image IPMASQ_KUBERNETES_DIR=$$kubernetes IPMASQ_CONTAINERD_DIR=$$containerd IPMASQ_SIG_NETWORK_DIR=$$tests IPMASQ_COREDNS_DIR=$$coredns \
		go test -tags e2e_cluster,e2e_kubernetes -count=1 -timeout 6h -run '^TestNetworkTests$$' $(TESTFLAGS) ./e2e/cluster

e2e-runtimes: PACKAGES := containerd runc podman iptables nftables conntrack iproute2
e2e-runtimes: packages build $(CNI_TOOLS) ## pods under containerd 1.6 and 2.4, podman and CRI-O's calls (root)
	@echo "e2e-runtimes: about 2 minutes on two cores; the first time 90 s more to build containerd"
	containerd=$$($(CONTAINERD)) && IPMASQ_CONTAINERD_DIR=$$containerd \
		go test -tags e2e_runtimes -count=1 -timeout $$(go run ./e2e/timelimit/scale 15m) ./e2e/runtimes/... $(TESTFLAGS)

e2e-packages: PACKAGES := mmdebstrap iptables nftables conntrack iproute2
e2e-packages: packages $(CNI_TOOLS) $(RELEASE) ## packages installed, upgraded and removed on a Debian while pods run (root)
	@echo "e2e-packages: about 3 minutes on two cores; the first time 3 more to install two roots of Debian"
	rm -rf bin/releases
	for release in v0.1.0 v0.1.1; do SOURCE_DATE_EPOCH=$(COMMIT_TIME) $(RELEASE) -version $$release -arch $$(go env GOARCH) \
		-commit $$(git rev-parse HEAD) -dist bin/releases/$$release || exit 1; done
	machine=$$(tools/debian-root bookworm systemd iptables nftables iproute2 kmod rpm) && lintian=$$(tools/debian-root bookworm lintian) && \
		IPMASQ_DEBIAN_ROOT=$$machine IPMASQ_LINTIAN_ROOT=$$lintian IPMASQ_RELEASES_DIR=$(CURDIR)/bin/releases \
		go test -tags e2e_packages -count=1 -timeout $$(go run ./e2e/timelimit/scale 30m) ./e2e/packages $(TESTFLAGS)

# One kernel with KERNELS=bookworm-amd64.
e2e-kernels: PACKAGES := qemu-system-x86 qemu-system-arm qemu-system-misc mmdebstrap e2fsprogs cpio kmod xz-utils
e2e-kernels: packages ## virtual machines with Debian's kernels and programs; writes docs/kernels (root; 15 min each)
	go test -tags e2e_kernels -count=1 -timeout 12h -v -run 'TestKernels/$(KERNELS)' ./e2e/kernels

# About 4 minutes on two cores. A quick run (BENCHFLAGS=-quick) writes to bin/bench/quick.
bench: PACKAGES += time
bench: packages build $(CNI_TOOLS) ## benchmarks: writes bin/bench/results.txt (BENCHFLAGS=-quick)
	go -C tools/bench build -ldflags "-s -w" -o $(CURDIR)/bin/bench/ ./...
	bin/bench/bench $(BENCHFLAGS)

# An archive for `ctr images import`, `podman load` and `skopeo copy`; no registry or daemon is asked.
image: IMAGE_FILE = bin/image/ip-masq-$(VERSION).tar
image: IMAGE_FLAGS = -name $(IMAGE):$(VERSION)
image-iptables: IMAGE_FILE = bin/image/ip-masq-$(VERSION)-iptables.tar
image-iptables: IMAGE_FLAGS = -name $(IMAGE):$(VERSION)-iptables -iptables
image image-iptables: ## the container image, without and with iptables, as an archive in bin/image/
	@for arch in $(ARCHES); do \
		mkdir -p bin/image/$$arch && echo "building for $$arch" && \
		GOARCH=$$arch $(BUILD) -o bin/image/$$arch/ip-masq ./plugin && \
		GOARCH=$$arch $(BUILD) -o bin/image/$$arch/ip-masq-reconciler ./reconciler || exit 1; \
	done
	go run ./deploy/image $(IMAGE_FLAGS) -version $(VERSION) -arch "$$(echo $(ARCHES) | tr ' ' ,)" -out $(IMAGE_FILE)
	@ls -l $(IMAGE_FILE)

# promtool is a large program, so this runs each night only. The tests of tools/deploy evaluate the alerts.
promtool: ## promtool checks the alerts
	@echo "promtool: a few seconds; the first time 2 minutes more to build promtool"
	promtool=$$(tools/cached promtool -tags remove_all_sd) && \
		IPMASQ_PROMTOOL_DIR=$$promtool go -C tools/deploy test -tags promtool -count=1 -run '^TestPromtool$$' ./alerts

man: ## manual pages and completions in bin/man and bin/completions
	SOURCE_DATE_EPOCH=$(COMMIT_TIME) go run -tags man -ldflags "$(STAMP)" ./reconciler bin

comma := ,
release: PACKAGES := minisign
release: packages $(RELEASE) ## a release in dist/: archives, packages, images, chart, SBOMs, signature (VERSION=v0.1.0 SIGNING_KEY=FILE)
	$(RELEASE) -version "$(VERSION)" -dist "$(DIST)" -image $(IMAGE) -arch $(subst $() ,$(comma),$(ARCHES)) \
		-key "$(SIGNING_KEY)" -debian-packages "$(DEBS)"

# No file may be changed, missing or added; only cosign verifies its own signature.
verify: PACKAGES := minisign
verify: packages ## whether a release is as it was signed (DIST=dist PUBLIC_KEY=FILE)
	minisign -V -p "$(PUBLIC_KEY)" -m "$(DIST)/SHA256SUMS"
	cd "$(DIST)" && LC_ALL=C ls -A | grep -vxE 'SHA256SUMS(\.minisig|\.sigstore\.json)?' | xargs -d '\n' sha256sum 2>&1 | diff SHA256SUMS -

release-test: PACKAGES := minisign
release-test: packages $(DEPLOY_TOOLS) ## two releases for all architectures are equal, and each change of a file is found
	@echo "release-test: about 5 minutes on two cores"
	RELEASE_TEST_ARCHES=$(subst $() ,$(comma),$(ARCHES)) RELEASE_TEST_DEBS="$(DEBS)" \
		go -C tools/release test -count=1 -timeout $$(go run ./e2e/timelimit/scale 1h) -run 'TestRelease$$' -v .

imitations: ## whether the software that tests imitate has changed since (network)
	tools/imitations

packages: ## Debian packages that tests and demo use (root on Debian: installs them)
	@tools/debian-packages $(PACKAGES)

clean: ## remove bin/
	rm -rf bin

# Tools are pinned in modules of their own, so that the project does not depend on what they depend on.
$(CNI_TOOLS): tools/cni/go.mod tools/cni/go.sum $(wildcard tools/cni/*/*.go)
	go -C tools/cni build -ldflags "-s -w" -o $(CURDIR)/bin/cni/ tool ./crioverbs ./multus
	@touch $@

$(DEPLOY_TOOLS): $(wildcard tools/deploy/go.* tools/deploy/*/*.go tools/helm/go.*)
	go -C tools/deploy build -ldflags "-s -w" -o $(CURDIR)/bin/deploy/ tool ./schemas
	go -C tools/helm build -ldflags "-s -w" -o $(CURDIR)/bin/deploy/ tool
	mkdir -p bin/deploy/kubernetes && bin/deploy/schemas bin/deploy/kubernetes
	@touch $@

$(READINESS): tools/node-readiness
	tools/node-readiness bin/readiness
	@touch $@

$(RELEASE): $(shell find tools/release -type f)
	go -C tools/release build -ldflags "-s -w" -o $(CURDIR)/$@ .

$(LINTERS): $(wildcard tools/lint/go.* tools/actionlint/go.* tools/vale/go.*)
	for module in lint actionlint vale; do go -C tools/$$module build -ldflags "-s -w" -o $(CURDIR)/bin/lint/ tool || exit 1; done
	@touch $@
