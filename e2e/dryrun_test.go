// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// failingDriver is a driver whose backends cannot write, as without a program or a privilege.
type failingDriver struct{ netfilter.Driver }

func (u failingDriver) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := u.Driver.Open(c)
	return failingBackend{b}, err
}

type failingBackend struct{ netfilter.Backend }

var errFailingBackend = fmt.Errorf("nothing can be written: %w", netfilter.ErrUnusable)

func (failingBackend) CanWrite(context.Context, policy.Family) error { return errFailingBackend }

func (failingBackend) Apply(context.Context, policy.Ruleset, netfilter.Observation, *os.File) error {
	return errFailingBackend
}

// flakyDriver is a driver whose first probe fails.
type flakyDriver struct {
	netfilter.Driver
	probed bool
}

func (u *flakyDriver) Probe(ctx context.Context, variant string) (netfilter.Choice, error) {
	if !u.probed {
		u.probed = true
		return netfilter.Choice{}, errFailingBackend
	}
	return u.Driver.Probe(ctx, variant)
}

// TestBackendChosenAgainWithLock checks that an ADD chooses the backend again under the lock if the
// first choice failed.
func TestBackendChosenAgainWithLock(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		n.addAndCheck(t, conf)
		n.flush(t)
		must(t, os.Remove(filepath.Join(n.dataDir, "record.json")))
		must(t, n.callInProcess(t, "ADD", conf, "unable at first"))
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	})
}

// faults are the faults of a node. Each field has one of the texts in randomFaults.
type faults struct {
	state, document, rules, backend, lock string
	guard                                 string // the key; "" is none
}

func randomFaults(random *rand.Rand) faults {
	one := func(texts ...string) string { return texts[random.IntN(len(texts))] }
	return faults{
		state: one("writable", "read-only", "full", "1 page", "2 pages", "3 pages", "without lock, read-only", "without lock, full",
			"absent", "absent, read-only", "absent, full", "another program's"),
		document: one("same", "same", "changed", "absent", "damaged", "other damaged", "newer", "newer other", "no record", "conflict", "waits"),
		rules:    one("right", "gone", "drifted"),
		backend:  one("able", "able", "unable", "auto, nftables unable"),
		lock:     one("free", "free", "free", "held"),
	}
}

// TestStatusIsADryRun checks with random combinations of faults that STATUS fails exactly if the
// next ADD fails, and writes nothing.
func TestStatusIsADryRun(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		const rounds = 100
		if n.backend.variant == "" {
			n.path = n.linkBothVariants(t, "nft")
		}
		count := map[bool]int{}
		for range rounds {
			f := randomFaults(random)
			if ok := n.compareStatusWithADD(t, f); t.Failed() {
				t.Fatalf("seed %d: %+v", seed, f)
			} else {
				count[ok]++
			}
		}
		t.Logf("%d of %d ADDs succeeded", count[true], rounds)
		if count[true] < rounds/10 || count[false] < rounds/10 {
			t.Error("too few ADDs with one of the results")
		}
	})
}

// TestStatusInKnownStates checks fixed combinations of faults in the same way, and the result of
// the ADD.
func TestStatusInKnownStates(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if n.backend.variant == "" {
			n.path = n.linkBothVariants(t, "nft")
		}
		for _, c := range []struct {
			faults
			ok bool
		}{
			{faults{"read-only", "same", "gone", "able", "free", ""}, true}, // the repair writes no document
			{faults{"full", "same", "gone", "able", "free", ""}, true},
			{faults{"full", "same", "drifted", "able", "free", ""}, true},
			{faults{"read-only", "same", "gone", "able", "free", "drop"}, true}, // without the reset of connections
			{faults{"full", "same", "gone", "able", "free", "drop"}, true},
			{faults{"full", "changed", "right", "able", "free", ""}, false},
			{faults{"read-only", "changed", "right", "able", "free", ""}, false},
			{faults{"read-only", "absent", "right", "able", "free", ""}, true}, // the rules are correct already
			{faults{"read-only", "same", "gone", "unable", "free", ""}, false},
			{faults{"writable", "same", "right", "unable", "held", ""}, true},
			{faults{"writable", "same", "gone", "able", "held", ""}, false},
			{faults{"absent, read-only", "same", "gone", "able", "free", ""}, false},
			{faults{"writable", "newer", "gone", "able", "free", ""}, false},
			{faults{"writable", "newer", "drifted", "able", "free", ""}, true},
			{faults{"1 page", "same", "drifted", "auto, nftables unable", "free", ""}, n.backend.variant != ""}, // the move needs a record
			{faults{"1 page", "other damaged", "drifted", "auto, nftables unable", "free", ""}, true},           // all rules stay as they are
		} {
			if ok := n.compareStatusWithADD(t, c.faults); ok != c.ok {
				t.Errorf("%+v: ADD succeeds: %t, want %t", c.faults, ok, c.ok)
			}
		}
	})
}

// compareStatusWithADD prepares a node, applies the faults, and fails the test if STATUS and ADD
// give different results. It reports whether the ADD succeeded.
func (n *node) compareStatusWithADD(t *testing.T, f faults) bool {
	t.Helper()
	const page = 4096
	disk := filepath.Join(n.dir, "disk")
	must(t, os.Mkdir(disk, 0o700))
	must(t, syscall.Mount("disk", disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", 64*page)))
	defer func() { must(t, errors.Join(syscall.Unmount(disk, syscall.MNT_DETACH), os.Remove(disk))) }()
	n.dataDir = filepath.Join(disk, "data")
	n.flush(t)

	keys := object{}
	if f.guard != "" {
		keys["guard"] = f.guard
	}
	call := func(verb string, f faults) error {
		conf := n.conf(t, "podnet", keys)
		return n.callInProcess(t, verb, conf, f.backend)
	}
	must(t, call("ADD", faults{}))
	must(t, n.callInProcess(t, "ADD", n.conf(t, "othernet", nil), ""))
	must(t, call("ADD", faults{}))
	record := filepath.Join(n.dataDir, "record.json")
	switch f.document {
	case "changed":
		keys["nonMasqueradeCIDRs"] = []string{"192.0.2.0/24"}
	case "absent":
		must(t, os.Remove(n.document(t, "podnet")))
	case "damaged":
		must(t, os.WriteFile(n.document(t, "podnet"), []byte(`{"schema":1,`), 0o600))
	case "other damaged":
		must(t, os.WriteFile(n.document(t, "othernet"), []byte(`{"schema":1,`), 0o600))
	case "newer":
		must(t, os.WriteFile(n.document(t, "podnet"), []byte(`{"schema":99}`), 0o600))
	case "newer other":
		must(t, os.WriteFile(n.document(t, "othernet"), []byte(`{"schema":99}`), 0o600))
	case "no record":
		must(t, os.Remove(record))
	case "conflict":
		c := *n.load(t).Find(networkID("othernet"))
		yes := true
		c.Policy.RandomFully = &yes
		n.storeSource(t, c)
		keys["randomFully"] = false
	case "waits":
		keys["requireAgentConfig"] = true
	}
	if strings.HasPrefix(f.backend, "auto") {
		keys["backend"] = "auto"
	}
	switch f.rules {
	case "gone":
		n.flush(t)
	case "drifted":
		n.alter(t, "-D IP-MASQ-AGENT 1", "delete element ip ip-masq exempt-IP-MASQ-AGENT { 169.254.0.0/16 }")
	}
	if strings.HasPrefix(f.state, "without lock") {
		must(t, os.Remove(filepath.Join(n.dataDir, "lock")))
	} else if f.lock == "held" {
		defer n.holdLock(t)()
	}
	if strings.HasPrefix(f.state, "absent") || f.state == "another program's" {
		must(t, os.RemoveAll(n.dataDir))
	}
	switch _, what, _ := strings.Cut(f.state, ", "); {
	case f.state == "another program's":
		must(t, os.Mkdir(n.dataDir, 0o700))
		must(t, os.WriteFile(filepath.Join(n.dataDir, "notes"), nil, 0o600))
	case f.state == "read-only", what == "read-only":
		defer n.readOnly(t, disk)()
	case f.state == "full", what == "full":
		fillDisk(t, disk, 0)
	case strings.Contains(f.state, "page"):
		fillDisk(t, disk, int64(f.state[0]-'0')*page)
	}

	before, generation := tree(t, disk), n.generation(t)
	status := call("STATUS", f)
	if now := tree(t, disk); now != before {
		t.Errorf("STATUS changed files:\n%s\nwere:\n%s", now, before)
	}
	if now := n.generation(t); now != generation {
		t.Errorf("STATUS changed rules: generation %d, was %d", now, generation)
	}
	add := call("ADD", f)
	if (status == nil) != (add == nil) {
		t.Errorf("%+v\nSTATUS: %v\nADD:    %v", f, status, add)
	}
	return add == nil
}

// fillDisk leaves free bytes in a file system.
func fillDisk(t *testing.T, disk string, free int64) {
	t.Helper()
	file, err := os.Create(filepath.Join(disk, "ballast"))
	must(t, err)
	var st syscall.Statfs_t
	must(t, syscall.Fstatfs(int(file.Fd()), &st))
	_, err = file.Write(bytes.Repeat([]byte{1}, max(0, int(st.Bfree)*int(st.Bsize)-int(free))))
	must(t, errors.Join(err, file.Close()))
}

// callInProcess runs a verb of the plugin in this process, in the node's network namespace.
func (n *node) callInProcess(t *testing.T, verb, conf, backend string) error {
	t.Helper()
	nft := nftables.New()
	drivers := netfilter.Drivers{iptables.New(iptables.Options{Path: n.path}), nft}
	for i, d := range drivers {
		if backend == "unable" || d == nft && strings.HasSuffix(backend, "nftables unable") {
			drivers[i] = failingDriver{d}
		}
		if backend == "unable at first" {
			drivers[i] = &flakyDriver{Driver: d}
		}
	}
	p := cniplugin.Plugin{
		Drivers: drivers, Program: "v", Generation: nft.Generation, PluginFile: "/etc/ip-masq/plugin.toml",
		LockWait: 20 * time.Millisecond, Stdout: io.Discard, Stderr: io.Discard,
	}
	verbs := p.Funcs()
	do := map[string]func(*skel.CmdArgs) error{"ADD": verbs.Add, "STATUS": verbs.Status}[verb]
	args := skel.CmdArgs{ContainerID: "container", Netns: "/run/netns/container", IfName: "eth0", StdinData: []byte(conf)}
	err := n.Node.Do(func() error { return do(&args) })
	must(t, nft.Close())
	return err
}
