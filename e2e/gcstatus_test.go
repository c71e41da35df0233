// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const validAttachments = "cni.dev/valid-attachments"

// TestGC checks that GC removes an attachment of its network that is not valid, and repairs the rules. Tests of package
// cniplugin have the lists.
func TestGC(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", nil)
		for _, id := range []string{"a", "b"} {
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: id}).want(t, 0)
		}
		n.flush(t)
		valid := []object{{"containerID": "a", "ifname": "eth0"}}
		gc := n.conf(t, "podnet", object{validAttachments: valid, "prevResult": nil})
		n.invoke(t, invocation{verb: "GC", conf: gc, noNetns: true}).want(t, 0).noWarnings(t)
		n.wantAttachments(t, "podnet", 1)
		n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	})
}

// TestGCFails checks that GC fails for a read-only state, that it repairs the rules before that, and that it
// creates no state.
func TestGCFails(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := n.conf(t, "podnet", nil)
	n.addAndCheck(t, conf)
	writable := n.readOnly(t, n.dataDir)
	none := n.conf(t, "podnet", object{validAttachments: []object{}})
	n.flush(t)
	n.invoke(t, invocation{verb: "GC", conf: none}).want(t, 5, "read-only file system", "mount its file system writable")
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	writable()
	n.invoke(t, invocation{verb: "GC", conf: none}).want(t, 0)
	// The record of a new boot comes before its rules.
	n.addAndCheck(t, conf)
	n.endBoot(t)
	n.flush(t)
	flushed := n.ruleset(t)
	writable = n.readOnly(t, n.dataDir)
	n.invoke(t, invocation{verb: "GC", conf: n.conf(t, "podnet", nil)}).want(t, 5, "record.json", "read-only file system")
	wantSame(t, "rules after GC with the record of an earlier boot", n.ruleset(t), flushed)
	writable()
	n.invoke(t, invocation{verb: "GC", conf: none}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	// GC of a node without state creates nothing.
	must(t, os.RemoveAll(n.dataDir))
	before := n.snapshot(t)
	n.invoke(t, invocation{verb: "GC", conf: none}).want(t, 0)
	n.unchanged(t, before)
}

// TestStatus checks that STATUS fails with code 50 and the reason if every ADD would fail, succeeds
// otherwise, and writes nothing.
func TestStatus(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		status := func(t *testing.T, keys object, r invocation, code uint, msgs ...string) {
			t.Helper()
			r.verb, r.noNetns = "STATUS", true
			if r.conf == "" {
				keys = maps.Clone(keys)
				keys["prevResult"] = nil
				r.conf = n.conf(t, "podnet", keys)
			}
			before := n.snapshot(t)
			n.invoke(t, r).want(t, code, msgs...)
			n.unchanged(t, before)
		}
		wait := object{"requireAgentConfig": true}
		t.Run("fresh node", func(t *testing.T) { status(t, object{}, invocation{}, 0) })
		t.Run("no program", func(t *testing.T) {
			if n.backend.variant == "" {
				status(t, object{}, invocation{path: "/nonexistent"}, 0)
			} else {
				status(t, object{}, invocation{path: "/nonexistent"}, 50, "install iptables")
			}
		})
		t.Run("correct rules", func(t *testing.T) {
			n.storeSource(t, agentFilesSource(nil))
			n.addAndCheck(t, n.conf(t, "podnet", wait))
			status(t, wait, invocation{}, 0)
			status(t, wait, invocation{path: "/nonexistent"}, 0) // ADD writes nothing
			defer n.readOnly(t, n.dataDir)()
			status(t, wait, invocation{}, 0)
		})
		t.Run("rules gone", func(t *testing.T) {
			n.flush(t)
			status(t, wait, invocation{}, 0) // the next ADD creates the rules
			status(t, wait, invocation{unprivileged: true}, 50, "peration not permitted")
		})
	})
}

// TestStatusOwnedGuardTable: while another program owns a table ip-masq-guard that the policy needs, every ADD and
// STATUS fail. Kernels before 5.12 have no owners of tables.
func TestStatusOwnedGuardTable(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if sandbox.KernelBefore(5, 12) {
			return
		}
		const message = "table ip ip-masq-guard is owned by another program"
		conf := n.conf(t, "podnet", object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16"}})
		without := n.conf(t, "podnet", nil) // ADD removes a guard table that no policy wants
		for _, prepare := range []func(){
			func() {}, // a fresh node
			func() { n.addAndCheck(t, conf) },
			func() { n.addAndCheck(t, conf); n.flush(t) },
		} {
			prepare()
			release := n.ownTable(t, "ip", "ip-masq-guard")
			state := n.snapshot(t)
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 50, message)
			n.unchanged(t, state)
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: "fails"}).want(t, 100, message)
			n.invoke(t, invocation{verb: "STATUS", conf: without, noNetns: true}).want(t, 50, message)
			n.invoke(t, invocation{verb: "ADD", conf: without, id: "fails"}).want(t, 100, message)
			release()
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
			n.addAndCheck(t, conf)
			n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
		}
	})
}

// TestStatusBesideAnOwnedTable: a guard needs its own tables alone, and not that of nftables' chains.
func TestStatusBesideAnOwnedTable(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if n.backend.variant == "" || sandbox.KernelBefore(5, 12) {
			return
		}
		defer n.ownTable(t, "ip", "ip-masq")()
		for _, mode := range []string{"drop", "count"} {
			conf := n.conf(t, "podnet", object{"guard": mode, "podCIDRs": []string{"10.1.0.0/16"}})
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0).noWarnings(t)
			n.addAndCheck(t, conf)
			n.tool(t, "nft", "delete", "table", "ip", "ip-masq-guard")
		}
	})
}

// TestStatusOfAMissingFamily: a program that only the rules of another family need fails no ADD.
func TestStatusOfAMissingFamily(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if n.backend.variant == "" {
			return
		}
		conf := n.conf(t, "podnet", object{"enableIPv6": true})
		n.addAndCheck(t, conf)
		defer n.breakProgram(t, "ip6tables-restore", "false")()
		n.tool(t, "iptables", "-t", "nat", "-F", "POSTROUTING")
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		n.addAndCheck(t, conf)
		n.tool(t, "ip6tables", "-t", "nat", "-F", "POSTROUTING")
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 50, "ip6tables")
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "fails"}).want(t, 100, "ip6tables")
	})
}

// TestStatusOfRefusedWrites: where table nat does not take the rules, because another program owns it or has a jump to the
// chain in a hook for which MASQUERADE is not made, ADD fails and STATUS with it.
func TestStatusOfRefusedWrites(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		if n.backend.variant == "" || sandbox.KernelBefore(5, 12) {
			return
		}
		conf := n.conf(t, "podnet", nil)
		refused := func(message string) {
			t.Helper()
			state := n.snapshot(t)
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 50, message)
			n.unchanged(t, state)
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: "fails"}).want(t, 100, message)
		}
		if n.backend.variant == "nft" {
			release := n.ownTable(t, "ip", "nat")
			refused("table ip nat is owned by another program")
			release()
		}
		n.tool(t, "iptables", "-t", "nat", "-N", "IP-MASQ-AGENT")
		n.tool(t, "iptables", "-t", "nat", "-A", "OUTPUT", "-j", "IP-MASQ-AGENT")
		refused("OUTPUT")
		n.tool(t, "iptables", "-t", "nat", "-F", "OUTPUT")
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		n.addAndCheck(t, conf)
	})
}

// TestStatusOfRefusedRecords: where the directory of the records of pods is refused, every ADD fails, and so does STATUS.
func TestStatusOfRefusedRecords(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}})
		other := n.conf(t, "other", object{"masqChain": "OTHER"})
		n.invoke(t, invocation{verb: "ADD", conf: other, id: "other"}).want(t, 0)
		n.addAndCheck(t, conf)
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		must(t, os.Chmod(filepath.Join(n.dataDir, "attachments"), 0o777))
		for _, conf := range []string{conf, other} {
			n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 50, "attachments")
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: "fails"}).want(t, 7, "attachments", "refused")
		}
		must(t, os.Chmod(filepath.Join(n.dataDir, "attachments"), 0o700))
		must(t, os.Chown(n.dataDir, 65534, 65534))
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 50, n.dataDir, "refused")
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "fails"}).want(t, 7, n.dataDir, "refused")
		n.invoke(t, invocation{verb: "DEL", conf: conf, id: "fails"}).want(t, 0)
	})
}

// TestStatusOnReadOnlyDisk: ADD fails where its pod cannot be recorded, and STATUS passes: it would cost the node its pods.
func TestStatusOnReadOnlyDisk(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}})
		n.addAndCheck(t, conf)
		n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0)
		defer n.readOnly(t, n.dataDir)()
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		for _, space := range []string{"dev", "prod"} {
			n.invoke(t, invocation{verb: "ADD", conf: conf, id: space, args: "K8S_POD_NAMESPACE=" + space}).
				want(t, 11, "record the pod: ", n.dataDir, "read-only file system", "mount its file system writable")
		}
		n.flush(t)
		flushed := n.ruleset(t)
		n.invoke(t, invocation{verb: "STATUS", conf: conf, noNetns: true}).want(t, 0)
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "dev"}).want(t, 11, "read-only file system")
		wantSame(t, "rules after an ADD that could not record its pod", n.ruleset(t), flushed)
		n.invoke(t, invocation{verb: "DEL", conf: conf, id: "dev"}).want(t, 0)
		n.invoke(t, invocation{verb: "CHECK", conf: conf, id: "dev"}).want(t, 0)
	})
}

// ownTable makes a table another program's own (flags owner), empty, until release is called.
func (n *node) ownTable(t *testing.T, family, name string) (release func()) {
	t.Helper()
	owner := n.Node.Command(n.timeout(t), "nft", "-i")
	in := assert.Must(owner.StdinPipe())(t)
	must(t, owner.Start())
	table := family + " " + name
	assert.Must(fmt.Fprintf(in, "add table %s\ndelete table %[1]s\nadd table %[1]s { flags owner; }\n", table))(t)
	if !timelimit.Await(timelimit.Wait, func() bool { return strings.Contains(n.tool(t, "nft", "list", "ruleset"), "flags owner") }) {
		t.Fatal(n.tool(t, "nft", "list", "ruleset"))
	}
	return func() {
		t.Helper()
		must(t, in.Close())
		must(t, owner.Wait())
	}
}

// TestStatusWithCnitool runs STATUS by cnitool, with an entry that allows pods and with one that
// does not.
func TestStatusWithCnitool(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	for _, keys := range []object{{}, {"requireAgentConfig": true}} {
		n.conflist(t, "podnet", keys)
		r := assert.Must(n.cni.Status(n.timeout(t), "podnet"))(t)
		if failed := r.ExitCode != 0; failed != (len(keys) > 0) {
			t.Errorf("STATUS with %v: exit code %d\n%s%s", keys, r.ExitCode, r.Stdout, r.Stderr)
		}
	}
}

// TestRequireAgentConfig checks that the first ADD fails with code 11 until the agent files are
// stored, and that its retry succeeds.
func TestRequireAgentConfig(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"requireAgentConfig": true})
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).
			want(t, 11, "requireAgentConfig: no policy of the agent files is stored yet", "start ip-masq-reconciler", "or remove the key")
		n.invoke(t, invocation{verb: "DEL", conf: conf}).want(t, 0).noWarnings(t)
		wantSame(t, "rules", n.ruleset(t), before)
		if s := n.load(t); len(s.Sources) > 0 {
			t.Errorf("documents: %+v", s.Sources)
		}
		n.storeSource(t, agentFilesSource(func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = prefixes("192.0.2.0/24") }))
		n.addAndCheck(t, conf).noWarnings(t)
		wantText(t, "rules with the policy of the agent files", n.rules(t), "192.0.2.0/24")
		// It is stored, also if it can no longer be read.
		must(t, os.Truncate(filepath.Join(n.dataDir, "sources", filepath.Base(store.Open(n.dataDir).DocumentPath(policy.SourceID{Kind: policy.AgentFiles}))), 40))
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "damaged"}).want(t, 0)
	})
}

const earlierBoot = "00000000-0000-4000-8000-000000000000"

// endBoot changes the boot ID in the dataDir, so that it is from an earlier boot.
func (n *node) endBoot(t *testing.T) {
	t.Helper()
	boot := store.Open(n.dataDir).Boot()
	record, attachments := filepath.Join(n.dataDir, "record.json"), filepath.Join(n.dataDir, "attachments")
	text := strings.ReplaceAll(string(readFile(t, record)), boot, earlierBoot)
	must(t, errors.Join(os.WriteFile(record, []byte(text), 0o600), os.Rename(filepath.Join(attachments, boot), filepath.Join(attachments, earlierBoot))))
}
