// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
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
		must(t, n.callInProcess(t, "ADD", conf, "unable at first", false))
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	})
}

// faults are the faults of a node, as compareStatusWithADD reads them.
type faults struct {
	state, document, rules, backend, lock string
	guard                                 string // the key; "" is none
	subnet                                string // of the pod
	kernel                                string // whose rules there are, too
}

// TestStatusInKnownStates checks with combinations of faults that STATUS fails exactly if the next ADD fails, and writes
// nothing.
func TestStatusInKnownStates(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if n.backend.variant == "" {
			n.path = n.linkBothVariants(t, "nft")
		}
		for _, c := range []struct {
			faults
			ok bool
		}{
			{faults{"read-only", "same", "gone", "able", "free", "", "known", "ours"}, true}, // the repair writes no document
			{faults{"full", "same", "gone", "able", "free", "", "known", "ours"}, true},
			{faults{"full", "same", "drifted", "able", "free", "", "known", "ours"}, true},
			{faults{"read-only", "same", "gone", "able", "free", "drop", "known", "ours"}, true}, // without the reset of connections
			{faults{"full", "same", "gone", "able", "free", "drop", "known", "ours"}, true},
			{faults{"full", "changed", "right", "able", "free", "", "known", "ours"}, false},
			{faults{"read-only", "changed", "right", "able", "free", "", "known", "ours"}, false},
			{faults{"read-only", "absent", "right", "able", "free", "", "known", "ours"}, true}, // the rules are correct already
			{faults{"read-only", "same", "gone", "unable", "free", "", "known", "ours"}, false},
			{faults{"writable", "same", "right", "unable", "held", "", "known", "ours"}, true},
			{faults{"writable", "same", "gone", "able", "held", "", "known", "ours"}, false},
			{faults{"absent, read-only", "same", "gone", "able", "free", "", "known", "ours"}, false},
			{faults{"writable", "newer", "gone", "able", "free", "", "known", "ours"}, false},
			{faults{"writable", "newer", "drifted", "able", "free", "", "known", "ours"}, true},
			{faults{"read-only", "same", "right", "able", "free", "count", "new", "ours"}, true}, // the subnet is not recorded
			{faults{"full", "same", "right", "able", "free", "drop", "new", "ours"}, true},
			{faults{"without lock, read-only", "same", "right", "able", "free", "count", "new", "ours"}, true},
			{faults{"full", "same", "gone", "able", "free", "count", "new", "ours"}, true},
			{faults{"read-only", "same", "drifted", "able", "free", "drop", "new", "ours"}, true},
			{faults{"read-only", "absent", "right", "able", "free", "count", "known", "ours"}, true},
			{faults{"read-only", "damaged", "right", "able", "free", "drop", "known", "ours"}, true}, // STATUS knows no subnet
			{faults{"writable", "other damaged, in a conflist", "drifted", "able", "free", "drop", "known", "ours"}, true},
			{faults{"full", "agent files damaged", "right", "able", "free", "", "known", "ours"}, true},
			{faults{"absent", "same", "right", "able", "free", "count", "known", "ours"}, true},
			{faults{"writable", "same", "right", "able", "free", "", "known", "an unwanted guard"}, true},
			{faults{"writable", "same", "right", "able", "free", "", "known", "another guard"}, false},
			{faults{"writable", "absent", "right", "able", "free", "", "known", "another chain"}, false},
			{faults{"1 page", "record damaged", "gone", "able", "free", "", "new", "ours"}, true}, // for the record
			{faults{"writable", "other damaged", "gone", "able", "free", "", "known", "an unwanted guard"}, true},
			{faults{"writable", "newer other", "drifted", "able", "free", "", "known", "ours"}, true},
			{faults{"writable", "no record", "gone", "able", "free", "", "known", "ours"}, true},
			{faults{"writable", "conflict", "right", "able", "free", "", "known", "ours"}, false},
			{faults{"another program's", "same", "right", "able", "free", "", "known", "ours"}, false},
			{faults{"absent, full", "waits", "right", "able", "free", "", "known", "ours"}, false},
			{faults{"without lock, full", "same", "gone", "able", "free", "", "known", "another chain too"}, false},
			{faults{"1 page", "same", "drifted", "auto, nftables unable", "free", "", "known", "ours"}, n.backend.variant != ""}, // the move needs a record
			{faults{"1 page", "other damaged", "drifted", "auto, nftables unable", "free", "", "known", "ours"}, true},           // what may be its rules stays
		} {
			wantSame(t, fmt.Sprintf("%+v: whether ADD succeeds", c.faults), n.compareStatusWithADD(t, c.faults), c.ok)
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
	n.removeRules(t)

	keys := object{}
	if f.guard != "" {
		keys["guard"] = f.guard
	}
	call := func(verb string, f faults) error {
		conf := n.conf(t, "podnet", keys)
		return n.callInProcess(t, verb, conf, f.backend, f.lock == "held")
	}
	agent := policy.SourceID{Kind: policy.AgentFiles}
	n.storeSource(t, policy.Source{ID: agent, Policy: policy.SourcePolicy{Chain: policy.DefaultChain}})
	must(t, call("ADD", faults{}))
	must(t, n.callInProcess(t, "ADD", n.conf(t, "othernet", object{"prevResult": resultWith("10.3.0.2/16")}), "", false))
	must(t, call("ADD", faults{}))
	newer, _ := newerDocument()
	record, torn := filepath.Join(n.dataDir, "record.json"), []byte("{")
	switch f.document {
	case "changed":
		keys["nonMasqueradeCIDRs"] = []string{"192.0.2.0/24"}
	case "absent":
		must(t, os.Remove(n.document(t, "podnet")))
	case "damaged":
		must(t, os.WriteFile(n.document(t, "podnet"), torn, 0o600))
	case "other damaged", "other damaged, in a conflist":
		must(t, os.WriteFile(n.document(t, "othernet"), torn, 0o600))
	case "agent files damaged":
		must(t, os.WriteFile(store.Open(n.dataDir).DocumentPath(agent), torn, 0o600))
	case "newer":
		must(t, os.WriteFile(n.document(t, "podnet"), []byte(newer), 0o600))
	case "newer other":
		must(t, os.WriteFile(n.document(t, "othernet"), []byte(newer), 0o600))
	case "no record":
		must(t, os.Remove(record))
	case "record damaged":
		must(t, os.WriteFile(record, torn, 0o600))
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
	switch f.kernel {
	case "another chain":
		n.removeRules(t)
		n.addOwned(t, "IP-MASQ-AGENT", "/elsewhere")
	case "another chain too":
		n.addOwned(t, "THEIRS", "/elsewhere")
	case "another guard":
		n.removeRules(t)
		n.addGuard(t, "/elsewhere")
	case "an unwanted guard":
		n.addGuard(t, n.dataDir)
	}
	if f.document == "other damaged, in a conflist" {
		n.standardConflist(t, "othernet", nil)
		defer func() { must(t, os.Remove(filepath.Join(n.own("/etc/cni/net.d"), "10-othernet.conflist"))) }()
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
	wantSame(t, "files", tree(t, disk), before)
	wantSame(t, "generation", n.generation(t), generation)
	if f.subnet == "new" {
		keys["prevResult"] = resultWith("10.7.0.2/16")
	}
	add := call("ADD", f)
	// STATUS does not know of the subnet: this ADD may wait for the lock to record it, or write a guard.
	ofSubnet := f.subnet == "new" && (f.lock == "held" || f.backend != "able")
	if (status == nil) != (add == nil) && (status != nil || !ofSubnet) {
		t.Errorf("%+v\nSTATUS: %v\nADD:    %v", f, status, add)
	}
	return add == nil
}

// removeRules removes all owned rules.
func (n *node) removeRules(t *testing.T) {
	t.Helper()
	if n.flush(t); n.backend.variant != "" {
		for _, f := range families() {
			n.tool(t, f[0], "-t", "nat", "-X")
		}
	}
	n.feed(t, "add table ip ip-masq-guard\ndelete table ip ip-masq-guard\n", "nft", "-f", "-")
}

// addOwned adds a chain that a dataDir owns.
func (n *node) addOwned(t *testing.T, chain, dataDir string) {
	t.Helper()
	comment := "ip-masq/1 keeps its state in " + dataDir
	if n.backend.variant == "" {
		n.feed(t, fmt.Sprintf("table ip ip-masq {\n chain masq-%s {\n masquerade comment %q\n }\n}\n", chain, comment), "nft", "-f", "-")
		return
	}
	n.tool(t, "iptables", "-t", "nat", "-N", chain)
	n.tool(t, "iptables", "-t", "nat", "-A", chain, "-m", "comment", "--comment", comment, "-j", "MASQUERADE")
}

// addGuard adds a guard that a dataDir owns and no document asks for.
func (n *node) addGuard(t *testing.T, dataDir string) {
	t.Helper()
	n.feed(t, fmt.Sprintf("table ip ip-masq-guard {\n chain guard-OLD {\n counter drop comment %q\n }\n}\n",
		"ip-masq/1 keeps its state in "+dataDir), "nft", "-f", "-")
}

// fillDisk leaves free bytes in a file system.
func fillDisk(t *testing.T, disk string, free int64) {
	t.Helper()
	file := assert.Must(os.Create(filepath.Join(disk, "ballast")))(t)
	var st syscall.Statfs_t
	must(t, syscall.Fstatfs(int(file.Fd()), &st))
	_, err := file.Write(bytes.Repeat([]byte{1}, max(0, int(st.Bfree)*int(st.Bsize)-int(free))))
	must(t, errors.Join(err, file.Close()))
}

// callInProcess runs a verb of the plugin in this process, in the node's network namespace. It does not
// wait for a lock that the test holds; it waits for one that a program of another test has inherited
// until it is executed.
func (n *node) callInProcess(t *testing.T, verb, conf, backend string, lockHeld bool) error {
	t.Helper()
	lockWait := 10 * time.Second
	if lockHeld {
		lockWait = 20 * time.Millisecond
	}
	nft := nftables.New()
	drivers := netfilter.Drivers{iptables.New(n.path), nft}
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
		LockWait: lockWait, Stdout: io.Discard, Stderr: io.Discard, Conntrack: conntrack.Reset,
	}
	verbs := p.Funcs()
	do := map[string]func(*skel.CmdArgs) error{"ADD": verbs.Add, "STATUS": verbs.Status}[verb]
	args := skel.CmdArgs{ContainerID: "container", Netns: "/run/netns/container", IfName: "eth0", StdinData: []byte(conf)}
	err := n.Node.Do(func() error { return do(&args) })
	must(t, nft.Close())
	return err
}
