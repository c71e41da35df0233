// SPDX-License-Identifier: Apache-2.0

//go:build e2e_kernels

package kernels

import "time"

// kernel is a Debian kernel and the userland of the same suite.
type kernel struct {
	suite, arch string
	// pack is the kernel's package: the one that depends on the newest of the suite.
	pack string
}

func (k kernel) String() string { return k.suite + "-" + k.arch }

var kernels = []kernel{
	{"bookworm", "amd64", "linux-image-cloud-amd64"},
	{"trixie", "arm64", "linux-image-cloud-arm64"},
	{"trixie", "s390x", "linux-image-s390x"},
}

// emulator is what qemu needs to know of an architecture.
type emulator struct {
	args    []string
	bus     string // the suffix of virtio devices
	console string
}

var emulators = map[string]emulator{
	// Without la57=off and cx16=off, kernel 6.12 has double faults under qemu 7.2. The other features make
	// the kernel slower under emulation.
	"amd64": {[]string{"qemu-system-x86_64", "-machine", "q35", "-cpu", "max,la57=off,cx16=off,erms=off,fsrm=off,smap=off,smep=off,avx=off,avx2=off"}, "pci", "ttyS0"},
	"arm64": {[]string{"qemu-system-aarch64", "-machine", "virt", "-cpu", "cortex-a72"}, "pci", "ttyAMA0"},
	"s390x": {[]string{"qemu-system-s390x", "-machine", "s390-ccw-virtio", "-cpu", "max"}, "ccw", "ttysclp0"},
}

// limit is that of a whole machine, from its start to its end.
const limit = time.Hour

// program is a test binary or another program that a machine runs.
type program struct {
	// dir is the package's directory, in which its tests run.
	dir string
	// run has the tests, as of `go test -run`: empty for all of them.
	run string
	// limit is the one that the tests have natively. In the machine it is longer.
	limit time.Duration
}

// The order is that of how much depends on the kernel.
var programs = []program{
	{dir: "pkg/netfilter/nfnetlink", limit: 2 * time.Minute},
	{dir: "pkg/netfilter/conntrack", limit: 2 * time.Minute},
	{dir: "pkg/netfilter/nftables", limit: 2 * time.Minute},
	{dir: "e2e", run: "^(TestIdempotence|TestTampering|TestAgentChainTakeover|TestReboot|TestGuardWrongPackets|TestPolicyChangeUnderConnections|TestWithoutPrograms)$", limit: 2 * time.Minute},
	{dir: "pkg/netfilter/iptables", limit: 2 * time.Minute},
}
