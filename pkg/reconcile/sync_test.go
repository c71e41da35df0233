// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	linkLocal = "169.254.0.0/16"
	// ofNetworks are the prefixes that a chain exempts without a key, if one of its sources is a network.
	ofNetworks = linkLocal + ",224.0.0.0/4,255.255.255.255"
	defaults   = "10.0.0.0/8," + linkLocal + ",172.16.0.0/12,192.168.0.0/16"
)

// Without a source nothing is managed, nothing is made, and the node is ready.
func TestNoSource(t *testing.T) {
	f := newFixture(t)
	f.wants(f.sync(), Unchanged)
	assert.Equal(t, "ruleset", f.nft("list", "ruleset"), "")
	if _, err := os.Stat(f.Dir.Path()); !os.IsNotExist(err) {
		t.Errorf("somebody made the dataDir: %v", err)
	}
}

// A directory that is missing means the same on a node that has none stored, and
// otherwise leaves what is stored in force.
func TestMissingAgentDirectory(t *testing.T) {
	f := newFixture(t)
	f.Settings.AgentConfigDir = filepath.Join(f.dir, "config")
	f.wants(f.sync(), Changed)
	f.exempts(defaults)

	f.withAgent()
	f.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	f.right()
	must(t, os.RemoveAll(f.Settings.AgentConfigDir))
	f.right()
	f.exempts("10.9.0.0/16," + linkLocal)

	f.Settings.AgentConfigDir = "" // no source any more: the policy outlives it
	f.right()
	f.exempts("10.9.0.0/16," + linkLocal)
}

// What is bad leaves the last good policy in force, and says why.
func TestBadSourcesLeaveTheLastGoodPolicy(t *testing.T) {
	f := newFixture(t).withAgent()
	path := f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	f.right()
	good := "10.1.0.0/16,10.9.0.0/16," + ofNetworks

	f.agentFile("nonMasqueradeCIDRs: [10.9.0.1/16]\n")
	f.wants(f.sync(), Unchanged, "ip-masq-agent", "nonMasqueradeCIDRs[0]", "10.9.0.1/16", "10.9.0.0/16")
	f.exempts(good)
	f.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	f.wants(f.sync(), Unchanged)

	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.1/16"}})
	f.wants(f.sync(), Unchanged, path, "nonMasqueradeCIDRs[0]", "no pod of this network can start")
	f.exempts(good)
	f.file(path, `{"name": "podnet", `)
	f.wants(f.sync(), Unchanged, path, "podnet")
	f.exempts(good)
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.wants(f.sync(), Unchanged)
}

// The backend of the settings is a preference: what a network states is in force, and conflicts with nothing.
func TestPreferredBackendConflictsWithNothing(t *testing.T) {
	f := newFixture(t).withAgent()
	f.Settings.Backend = policy.IPTables
	f.conflist("podnet", map[string]any{"backend": "nftables", "nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	f.right()
	f.exempts("10.1.0.0/16,10.9.0.0/16," + ofNetworks)
}

func TestReasonOfProblem(t *testing.T) {
	network := policy.SourceID{Kind: policy.Network, Name: "podnet"}
	for name, c := range map[string]struct {
		problem Problem
		want    Reason
	}{
		"a backend that is missing":              {Problem{Reason: ReasonRules, Err: fmt.Errorf("A: %w", netfilter.ErrUnusable)}, ReasonBackend},
		"a backend that fails":                   {Problem{Reason: ReasonRules, Err: errors.New("no")}, ReasonRules},
		"a missing backend elsewhere":            {Problem{Reason: ReasonState, Err: netfilter.ErrUnusable}, ReasonState},
		"a document that cannot be written":      {Problem{Reason: ReasonRules, Source: network, Err: &enforce.UnwritableError{Err: errors.New("no")}}, ReasonState},
		"a source that conflicts with another":   {Problem{Reason: ReasonSource, Source: network, Err: &policy.ConflictError{}}, ReasonConflict},
		"a source whose backend is missing":      {Problem{Reason: ReasonRules, Source: network, Err: netfilter.ErrUnusable}, ReasonBackend},
		"a record that cannot be written":        {Problem{Reason: ReasonRules, Source: network, Err: fmt.Errorf("record: %w", unix.EDQUOT)}, ReasonState},
		"a conflist on a broken disk":            {Problem{Reason: ReasonSource, Source: network, Err: fmt.Errorf("read: %w", unix.EIO)}, ReasonState},
		"settings on a broken disk":              {Problem{Reason: ReasonSource, Err: fmt.Errorf("settings: %w", unix.EIO)}, ReasonState},
		"a conflist that cannot be written":      {Problem{Reason: ReasonConflist, Err: unix.EROFS}, ReasonConflist},
		"a kernel without space":                 {Problem{Reason: ReasonRules, Err: unix.ENOSPC}, ReasonRules},
		"a conflict that no source is to answer": {Problem{Reason: ReasonRules, Err: &policy.ConflictError{}}, ReasonRules},
	} {
		var r Report
		if r.add(c.problem); r.Problems[0].Reason != c.want {
			t.Errorf("%s: reason %s, want %s", name, r.Problems[0].Reason, c.want)
		}
	}
}

// TestOwnedTable: a table that a program has made its own cannot be repaired, and
// the message says so; nothing counts as repaired meanwhile. Kernels before 5.12 have no owners.
func TestOwnedTable(t *testing.T) {
	f := newFixture(t)
	if sandbox.KernelBefore(5, 12) {
		if err := exec.Command("nft", "add table ip x { flags owner; }").Run(); err == nil {
			t.Error("the kernel has owners of tables")
		}
		return
	}
	f.conflist("podnet", nil)
	f.right()
	owner := exec.Command("nft", "-i")
	in := assert.Must(owner.StdinPipe())(t)
	must(t, owner.Start())
	assert.Must(in.Write([]byte("delete table ip ip-masq\nadd table ip ip-masq { flags owner; }\n")))(t)
	if !timelimit.Await(timelimit.Wait, func() bool { return strings.Contains(f.nft("list", "ruleset"), "flags owner") }) {
		t.Fatal(f.nft("list", "ruleset"))
	}
	r := f.sync()
	f.wants(r, Failed, "table ip ip-masq is owned by another program", "end it")
	if len(r.Drift) > 0 {
		t.Errorf("counts as repaired: %v", r.Drift)
	}
	must(t, in.Close())
	must(t, owner.Wait())
	f.wants(f.right(), Repaired)
}

// What was not made in this boot has not drifted.
func TestFirstSyncIsNoDrift(t *testing.T) {
	f := newFixture(t).withAgent()
	if r := f.right(); len(r.Drift) > 0 {
		t.Errorf("the first sync has drift: %v", r.Drift)
	}
	f.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	if r := f.right(); len(r.Drift) > 0 || r.Result != Changed {
		t.Errorf("%s: a change of policy has drift: %v", r.Result, r.Drift)
	}
}

// A network goes after ten minutes without an attachment and without a conflist
// that names it, in a directory that parses whole, and not earlier.
func TestUnusedNetworksAreDropped(t *testing.T) {
	f := newFixture(t)
	path := f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	other := f.conflist("other", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	f.right()
	must(t, f.Dir.Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}}))
	f.DropAfter = 0
	both, one := "10.1.0.0-10.2.255.255,"+ofNetworks, "10.2.0.0/16,"+ofNetworks
	kept := func(why string) {
		t.Helper()
		if r := f.right(); len(r.Dropped) > 0 {
			t.Fatalf("%s: dropped %v", why, r.Dropped)
		}
		f.exempts(both)
	}
	kept("a conflist names it")
	must(t, os.Remove(path))
	kept("it has an attachment")
	must(t, f.Dir.Detach(store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}))
	broken := filepath.Join(f.Settings.CNIConfDir, "99-broken.conflist")
	f.file(broken, "{")
	if r := f.sync(); len(r.Dropped) > 0 {
		t.Fatalf("a file cannot be read: dropped %v", r.Dropped)
	}
	must(t, os.Remove(broken))
	f.DropAfter = time.Hour
	kept("the time is not over")
	f.DropAfter = 0
	r := f.right()
	if len(r.Dropped) != 1 || r.Dropped[0].Name != "podnet" || f.stored("podnet") != nil {
		t.Fatalf("dropped %v", r.Dropped)
	}
	f.exempts(one)
	must(t, os.Remove(other))
	f.right()
	assert.Equal(t, "ruleset without sources", f.nft("list", "ruleset"), "")
}

// TestNetworkUsedWhileItIsDropped: an ADD attaches after its network's document was dropped, and before the rules go. It waits for
// the lock, and the document is there again for the rules and the report of the sync.
func TestNetworkUsedWhileItIsDropped(t *testing.T) {
	f := newFixture(t)
	k := netfiltertest.New()
	f.Drivers = k.Drivers()
	path := f.conflist("podnet", nil)
	f.right()
	must(t, os.Remove(path))
	f.DropAfter = 0
	isUsed := false
	k.Before = func(effect string, _ bool) error {
		if isUsed || f.stored("podnet") != nil || !strings.HasPrefix(effect, "observe") {
			return nil
		}
		isUsed = true
		return f.Dir.Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}})
	}
	r := f.sync()
	if !isUsed || len(r.Dropped) > 0 || len(r.InForce) != 1 || f.stored("podnet") == nil || len(k.Chains[netfiltertest.IPTables]) != 1 {
		t.Errorf("used %t, dropped %v, stored %v, chains %v", isUsed, r.Dropped, r.InForce, k.Chains)
	}
}

// TestPluginFileDropsOtherDocuments: with a plugin.toml, a document that did not come from a conflist of its
// directory is dropped, attachments or not, once the directory is read completely; one that did is kept as
// without the file.
func TestPluginFileDropsOtherDocuments(t *testing.T) {
	f := newFixture(t)
	exempt := func(prefix string) map[string]any { return map[string]any{"nonMasqueradeCIDRs": []string{prefix}} }
	f.conflist("podnet", exempt("10.1.0.0/16"))
	other := f.conflist("other", exempt("10.2.0.0/16"))
	bad := f.conflist("bad", exempt("10.3.0.0/16"))
	f.right()
	attachment := store.Attachment{Network: "other", ContainerID: "pod1", IfName: "eth0"}
	must(t, f.Dir.Attach(store.Pod{Attachment: attachment}))
	f.file(other, "{")
	f.conflist("bad", map[string]any{"nonMasqueradeCIDR": []string{}})
	f.pluginFile("")
	f.exempts("10.1.0.0-10.3.255.255," + ofNetworks)
	if r := f.sync(); len(r.Dropped) > 0 { // the directory is not read completely
		t.Errorf("dropped %v", r.Dropped)
	}
	text := assert.Must(os.ReadFile(bad))(t)
	must(t, os.Remove(other))
	if r := f.sync(); len(r.Dropped) != 2 || f.stored("other") != nil || f.stored("bad") != nil {
		t.Errorf("dropped %v", r.Dropped)
	}
	f.exempts("10.1.0.0/16," + ofNetworks)
	must(t, os.Remove(bad))
	podnet := filepath.Join(f.Settings.CNIConfDir, "10-podnet.conflist")
	must(t, os.Remove(podnet))
	if r := f.right(); len(r.Dropped) > 0 || f.stored("podnet").ConfDir != f.Settings.CNIConfDir {
		t.Errorf("dropped %v, stored %+v", r.Dropped, f.stored("podnet"))
	}
	f.exempts("10.1.0.0/16," + ofNetworks)
	f.file(bad, string(text)) // a mistake in another file
	f.pluginFile("bogus = 1")
	f.conflist("podnet", exempt("10.9.0.0/16"))
	f.nft("flush", "ruleset")
	r := f.sync()
	if f.wants(r, Repaired, "bogus: is not a known key"); len(r.Problems) != 1 || r.Problems[0].Reason != ReasonSource {
		t.Errorf("problems %+v", r.Problems)
	}
	f.exempts("10.1.0.0/16," + ofNetworks) // a bad file changes neither rules nor documents
	must(t, os.Remove(podnet))
	must(t, os.Remove(bad))
	elsewhere := filepath.Join(f.dir, "elsewhere")
	must(t, os.Mkdir(elsewhere, 0o755))
	f.file(f.PluginFile, fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n", f.Dir.Path(), elsewhere))
	if r := f.right(); len(r.Dropped) != 1 || f.stored("podnet") != nil {
		t.Errorf("dropped %v", r.Dropped)
	}
}

// TestConfDirOfPluginFile: the directory of conflists is that of plugin.toml, and one that is stated
// elsewhere is a fault.
func TestConfDirOfPluginFile(t *testing.T) {
	f := newFixture(t)
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.pluginFile("")
	f.Settings.CNIConfDir = filepath.Join(f.dir, "elsewhere")
	f.right() // it is a default, which the reconciler is about to replace
	f.exempts("10.1.0.0/16," + ofNetworks)
	f.Settings.Origins = map[string]string{"cni_conf_dir": "/etc/ip-masq/reconciler.toml:3"}
	r := f.sync()
	f.wants(r, Unchanged, "cni_conf_dir", "reconciler.toml:3", f.Settings.CNIConfDir, f.PluginFile)
	if len(r.Problems) != 1 || r.Problems[0].Reason != ReasonSource {
		t.Errorf("problems %+v", r.Problems)
	}
}

// Each of the moments since which nobody may want a network counts.
func TestDropWaitsForEachMoment(t *testing.T) {
	for _, young := range []string{"document", "attachments", "directory", "none"} {
		t.Run(young, func(t *testing.T) {
			f := newFixture(t)
			path := f.conflist("podnet", nil)
			f.right()
			must(t, f.Dir.Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}}))
			must(t, f.Dir.Detach(store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}))
			must(t, os.Remove(path))
			documents, err := filepath.Glob(f.Dir.Path() + "/sources/*.json")
			if err != nil || len(documents) != 1 {
				t.Fatal(documents, err)
			}
			attachments, err := filepath.Glob(f.Dir.Path() + "/attachments/*/*")
			if err != nil || len(attachments) != 1 {
				t.Fatal(attachments, err)
			}
			places := map[string]string{"document": documents[0], "attachments": attachments[0], "directory": f.Settings.CNIConfDir}
			for name, place := range places {
				if name != young {
					f.old(place)
				}
			}
			f.DropAfter = min(time.Minute, time.Since(booted())/2) // the machine may have been started just now
			if dropped := len(f.sync().Dropped) > 0; dropped != (young == "none") {
				t.Errorf("dropped: %t", dropped)
			}
		})
	}
}

func TestLockHeldByOthers(t *testing.T) {
	f := newFixture(t).withAgent()
	l := f.lock()
	f.Dir.LockWait = 50 * time.Millisecond
	f.wants(f.sync(), Failed, "lock")
	must(t, l.Release())
	f.right()
}

// A sync that was made for rules has sources from before. A policy that an ADD stored since then
// stays in force.
func TestSyncWithOldSourcesRevertsNoADD(t *testing.T) {
	f := newFixture(t)
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	old := f.Read()
	f.Sync(t.Context(), old)
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	f.right() // as an ADD does it
	r := f.Sync(t.Context(), old)
	f.wants(r, Unchanged)
	f.exempts("10.2.0.0/16," + ofNetworks)
	if len(r.Applied) > 0 {
		t.Errorf("the sync wrote: %+v", r)
	}
}

// A document that cannot be read and that no source makes again may be that of a network with pods: all
// chains stay as they are until it can be read. One that is lost is created, unless a newer version wrote the
// document.
func TestUnreadableDocumentOfNobody(t *testing.T) {
	const lost = "no conflist or agent file says what it held"
	t.Run("damaged", func(t *testing.T) { unreadableDocumentOfNobody(t, "{", false, lost) })
	newer := fmt.Sprintf(`{"schema":%d}`, store.Schema()+1)
	t.Run("newer", func(t *testing.T) { unreadableDocumentOfNobody(t, newer, true, "written by a newer version") })
}

func unreadableDocumentOfNobody(t *testing.T, unreadable string, isNewer bool, says string) {
	f := newFixture(t)
	other := func(exempt string) {
		f.conflist("other", map[string]any{"masqChain": "OTHER", "nonMasqueradeCIDRs": []string{exempt}, "guard": "drop", "podCIDRs": []string{"10.7.0.0/16"}})
	}
	other("192.0.2.0/24")
	path := f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.right()
	must(t, os.Remove(path))
	document := f.Dir.DocumentPath(policy.SourceID{Kind: policy.Network, Name: "podnet"})
	text := assert.Must(os.ReadFile(document))(t)
	f.file(document, unreadable)
	for range 2 {
		f.wants(f.sync(), Failed, document, says)
		f.exempts("10.1.0.0/16," + ofNetworks)
		if r := f.Check(t.Context()); r.Differs() || r.Ready() {
			t.Errorf("check: differs %t, ready %t", r.Differs(), r.Ready())
		}
	}
	has := func(what string, want bool) {
		t.Helper()
		if rules := f.nft("list", "ruleset"); strings.Contains(rules, what) != want {
			t.Errorf("%s: %t, want %t:\n%s", what, !want, want, rules)
		}
	}
	f.nft("delete", "table", "ip", "ip-masq-guard")
	f.nft("flush", "chain", "ip", "ip-masq", "masq-OTHER")
	if isNewer {
		f.wants(f.sync(), Failed, "chain OTHER does not exist, and is not created without all documents")
		if rules := f.nft("list", "chain", "ip", "ip-masq", "masq-OTHER"); strings.Contains(rules, "masquerade") {
			t.Errorf("created without all documents:\n%s", rules)
		}
		f.file(document, string(text))
		f.wants(f.sync(), Repaired)
		f.file(document, unreadable)
	} else {
		if r := f.Check(t.Context()); !r.Differs() {
			t.Error("check finds nothing")
		}
		if r := f.sync(); len(r.Drift) == 0 || r.Differs() {
			t.Errorf("repaired %v; left are %v", r.Drift, r.Rules.Diff())
		}
	}
	has("guard-OTHER", true)
	other("198.51.100.0/24")
	f.wants(f.sync(), Failed, document)
	has("198.51.100.0/24", false)
	has("192.0.2.0/24", true)
	f.exempts("10.1.0.0/16," + ofNetworks)
	f.file(document, string(text)) // what can be done about a newer one; the other is made again from the conflist
	f.conflist("podnet", map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	if r := f.right(); len(r.Drift) > 0 {
		t.Errorf("what the document held is drift: %v", r.Drift)
	}
	has("198.51.100.0/24", true)
	f.wants(f.sync(), Unchanged)
}

// observed is a driver that calls a function after each reading of rules.
type observed struct {
	netfilter.Driver
	after func()
}

func (d *observed) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := d.Driver.Open(c)
	return &observedBackend{b, d}, err
}

type observedBackend struct {
	netfilter.Backend
	driver *observed
}

func (b *observedBackend) Observe(ctx context.Context, chains []policy.ChainFamily) (netfilter.Observation, error) {
	rs, err := b.Backend.Observe(ctx, chains)
	b.driver.after()
	return rs, err
}

// unused makes a network one that nobody names or uses any more.
func (f *fixture) unused(network string) {
	f.Helper()
	path := f.conflist(network, map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.right()
	must(f.T, os.Remove(path))
}

// An ADD that attached before its network's document was gone has found all right,
// and keeps document and rules.
func TestAttachedWhileItsNetworkIsDropped(t *testing.T) {
	f := newFixture(t)
	f.conflist("other", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	f.unused("podnet")
	f.unused("third")
	f.DropAfter = 0
	attached := 0
	f.Drivers = netfilter.Drivers{&observed{f.Drivers[0], func() {
		if attached == 0 && f.stored("podnet") == nil { // it was dropped by now
			attached++
			assert.NoError(t, f.Dir.Attach(store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}}))
		}
	}}}
	r := f.right()
	assert.Equal(t, "attached", attached, 1)
	if f.stored("podnet") == nil {
		t.Error("the document is gone")
	}
	if len(r.Dropped) != 1 || r.Dropped[0].Name != "third" || f.stored("third") != nil {
		t.Errorf("dropped %v, want the third alone", r.Dropped)
	}
	f.exempts("10.1.0.0-10.2.255.255," + ofNetworks)
	f.wants(f.sync(), Unchanged)
}

// TestDropThatIsRefused: why the rules of a dropped network cannot be removed is reported once, and the sync
// after that removes them.
func TestDropThatIsRefused(t *testing.T) {
	f := newFixture(t)
	driver := &readOnly{Driver: f.Drivers[0]}
	f.Drivers = netfilter.Drivers{driver}
	f.conflist("other", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	f.unused("podnet")
	f.DropAfter = 0
	driver.broken.Store(true)
	r := f.sync()
	f.wants(r, Failed, "not today")
	if len(r.Problems) != 1 || len(r.Dropped) != 1 || f.stored("podnet") != nil {
		t.Errorf("%v dropped %v", problems(r), r.Dropped)
	}
	driver.broken.Store(false)
	f.right()
	f.exempts("10.2.0.0/16," + ofNetworks)
}

// TestRulesThatCannotBeRepaired: where rules differ and cannot be written, because a program or a capability
// is missing, both are faults.
func TestRulesThatCannotBeRepaired(t *testing.T) {
	for name, err := range map[string]error{
		"program":    fmt.Errorf("iptables: %w", netfilter.ErrUnusable),
		"capability": fmt.Errorf("write: %w", unix.EPERM),
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t).withAgent()
			driver := &readOnly{Driver: f.Drivers[0], err: err}
			f.Drivers = netfilter.Drivers{driver}
			f.right()
			driver.broken.Store(true)
			f.nft("flush", "ruleset")
			r := f.sync()
			var reasons []Reason
			for _, p := range r.Problems {
				reasons = append(reasons, p.Reason)
			}
			if !slices.Equal(reasons, []Reason{ReasonBackend, ReasonRules}) || !strings.Contains(problems(r).Error(), "missing jump") {
				t.Errorf("%s: %v", reasons, problems(r))
			}
		})
	}
}

// A chain that could not be removed from a backend that cannot be used any more does not make a sync, or the
// question before an entry is inserted, choose that backend: an ADD does not.
func TestStuckChainInAnUnusableBackend(t *testing.T) {
	f := newFixture(t)
	k := netfiltertest.New()
	f.Drivers = k.Drivers()
	k.Before = func(effect string, _ bool) error {
		if strings.Contains(effect, "nftables") && !strings.HasPrefix(effect, "list owners") && !strings.HasPrefix(effect, "find") {
			return netfilter.ErrUnusable
		}
		return nil
	}
	lock := assert.Must(f.Dir.Lock(t.Context()))(t)
	must(t, lock.PutRecord(store.Record{Boot: f.Dir.Boot(), Chains: []store.OwnedChain{
		{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.NFTables, RemovalFailed: true},
	}}))
	must(t, lock.Release())
	path := f.conflist("podnet", nil)
	must(t, f.CheckEntry(t.Context(), config.ParseConflist(path, assert.Must(os.ReadFile(path))(t))))
	if f.sync(); len(k.Chains[netfiltertest.IPTables]) == 0 {
		t.Errorf("the kernel has %v", k.Chains)
	}
}

// An entry that waits for agent files is not to take the place of one with which pods start, while none are stored.
func TestCheckEntryAwaitsAgentFiles(t *testing.T) {
	f := newFixture(t)
	path := f.conflist("podnet", map[string]any{"requireAgentConfig": true})
	list := config.ParseConflist(path, assert.Must(os.ReadFile(path))(t))
	err := f.CheckEntry(t.Context(), list)
	if err == nil || !strings.Contains(err.Error(), "requireAgentConfig") {
		t.Errorf("without agent files: %v", err)
	}
	lock := assert.Must(f.Dir.Lock(t.Context()))(t)
	agent := policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: policy.SourcePolicy{Chain: policy.DefaultChain}}
	must(t, lock.Put(agent))
	must(t, lock.Release())
	must(t, f.CheckEntry(t.Context(), list))
}

// What could not be removed in a former boot is gone, also where nothing else is to be recorded.
func TestStuckChainOfAFormerBoot(t *testing.T) {
	f := newFixture(t)
	lock := assert.Must(f.Dir.Lock(t.Context()))(t)
	must(t, lock.PutRecord(store.Record{Boot: "00000000-0000-0000-0000-000000000000", Chains: []store.OwnedChain{
		{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.NFTables, RemovalFailed: true},
	}}))
	must(t, lock.Release())
	f.right()
}
