// SPDX-License-Identifier: Apache-2.0

package kernels

import (
	"path/filepath"
	"time"
)

// kernel is a Debian kernel and the userland of the same suite.
type kernel struct {
	suite, arch string
	// pack is the kernel's package: the one that depends on the newest of the suite.
	pack string
}

func (k kernel) String() string { return k.suite + "-" + k.arch }

var kernels = []kernel{
	{"bullseye", "amd64", "linux-image-cloud-amd64"},
	{"bookworm", "amd64", "linux-image-cloud-amd64"},
	{"trixie", "amd64", "linux-image-cloud-amd64"},
	{"sid", "amd64", "linux-image-cloud-amd64"},
	{"trixie", "arm64", "linux-image-cloud-arm64"},
	// Not trixie's: 6.12 computes checksums with vector instructions, which qemu 7.2 emulates wrongly, so it
	// drops IPv6.
	{"bookworm", "s390x", "linux-image-s390x"},
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

// program is a test binary that a machine runs.
type program struct {
	// dir is the package's directory, in which its tests run.
	dir string
	// about tells programs of the same package apart.
	about string
	// run and skip select tests, as the flags of `go test` do.
	run, skip string
	// elsewhere selects tests on other architectures than amd64: those of byte order and, slower, of
	// packets. If empty, they do not run the program.
	elsewhere string
	// main is set if the package is a program without tests.
	main bool
}

// name is what the table calls it.
func (p program) name() string {
	if p.about == "" {
		return p.dir
	}
	return p.dir + ": " + p.about
}

func (p program) file() string { return filepath.Base(p.dir) + ".test" }

// The tests that depend most on the kernel and its programs, by measurement: a second of a native
// run takes about 30 here. What is skipped takes minutes, or depends on the kernel as others do: e2e
// tampers with the rules of each backend.
var programs = []program{
	{dir: "pkg/netfilter/nfnetlink", skip: "^TestLongBatch$", elsewhere: "."},
	{dir: "pkg/netfilter/conntrack", elsewhere: "^(TestReset|TestResetFamilies|TestDeletedByID|TestDeleteReversed|TestConnectionsByStatus|TestStatsCount)$"},
	{dir: "e2e", about: "ADD again, ADD without programs", run: "^(TestIdempotence|TestBackendOfALostRecord)$", elsewhere: "^(TestIdempotence|TestBackendOfALostRecord)$"},
	{dir: "e2e", about: "chains of ip-masq-agent", run: "^TestAgentChainTakeover$"},
	{dir: "e2e", about: "boot, guard", run: "^(TestGuardAtBoot|TestGuardWrongPackets)$", elsewhere: "^TestGuardWrongPackets$"},
	{dir: "e2e", about: "packets, backends", run: "^(TestChainedPlugins|TestBackendChange|TestIPv6NotTrackedUnlessEnabled|TestKeyRandomFully)$", elsewhere: "^(TestBackendChange|TestKeyRandomFully)$"},
	{dir: "e2e", about: "output addresses", run: "^(TestOutputAddress|TestOutputAddressLeaves)$", elsewhere: "^TestOutputAddress$"},
	{dir: "e2e", about: "stale connections", run: "^TestPolicyChangeUnderConnections$"},
	{dir: "e2e/demo", main: true, elsewhere: "."},
	{dir: "pkg/netfilter/nftables", skip: "^TestTamperingIsSeenAndRepaired$", elsewhere: "^(TestCodec|TestRender.*|TestGuardGolden|TestGuardPackets|TestEnforceSelf|TestOneSetChangesInPlace|TestSetAttributes)$"},
	{dir: "pkg/netfilter/iptables", skip: "^TestTampering$", elsewhere: "^(TestDecode|TestLegacy.*|TestNativeExpressions|TestObserve.*|TestRender|TestSavedByNFT|FuzzDecode)$"},
	{dir: "e2e", about: "tampering", run: "^TestTampering$", elsewhere: "^TestTampering$"},
	{dir: "pkg/netfilter/addresses", elsewhere: "."},
	{dir: "pkg/netfilter/thirdparty"},
	{dir: "pkg/fswatch", run: "^(TestNothingIsMissed|TestManyChangesAreOne|TestWhatIsMissingComes)$"},
	{dir: "pkg/enforce"},
	{dir: "pkg/reconcile"},
	{dir: "pkg/store"},
}

// programsOn returns the programs that an architecture's machines run.
func programsOn(arch string) (run []program) {
	for _, p := range programs {
		if arch != "amd64" {
			p.run = p.elsewhere
		}
		if arch == "amd64" || p.elsewhere != "" {
			run = append(run, p)
		}
	}
	return run
}
