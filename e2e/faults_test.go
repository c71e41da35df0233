// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestDiskFull has between none and all of the room that an ADD with a new
// document needs: it succeeds whole, or fails and leaves the old policy whole,
// in the kernel and on the disk.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		const page = 4096
		disk := filepath.Join(n.dir, "disk")
		n.dataDir = filepath.Join(disk, "data")
		if err := os.Mkdir(disk, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount("full", disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", 16*page)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		ballast := filepath.Join(disk, "ballast")
		fill := func(free int64) {
			t.Helper()
			f, err := os.Create(ballast)
			if err != nil {
				t.Fatal(err)
			}
			size := int64(0)
			for err == nil {
				_, err = f.Write(make([]byte, page))
				size += page
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			if err := errors.Join(f.Truncate(max(0, size-page-free*page)), f.Close()); err != nil {
				t.Fatal(err)
			}
		}
		fill(0)
		first := n.conf(t, "podnet", nil)
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: first}).want(t, 100, "no space left on device", "free space or inodes on its file system")
		n.invoke(t, invocation{verb: "STATUS", conf: first}).want(t, 50, "no space left on device")
		if after := n.ruleset(t); n.backend.variant != "legacy" && after != before { // whose table was asked for, and is there, empty
			t.Errorf("rules changed:\n%s", after)
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		n.addAndCheck(t, first)
		failures := 0
		for free := range int64(6) {
			fill(free)
			rules, documents := n.ruleset(t), n.documentStamps(t)
			// All right but for the room, and then repaired without any.
			n.invoke(t, invocation{verb: "ADD", conf: first, id: fmt.Sprint("pod", free)}).want(t, 0).noWarnings(t)
			second := n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "SECOND", "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}})
			a := n.invoke(t, invocation{verb: "ADD", conf: second})
			if a.code == 0 {
				n.invoke(t, invocation{verb: "CHECK", conf: second}).want(t, 0)
			} else {
				failures++
				a.want(t, 100, "no space left on device")
				if now := n.ruleset(t); now != rules {
					t.Errorf("%d pages free: rules changed:\n%s", free, cmp.Diff(rules, now))
				}
				if now := n.documentStamps(t); now != documents {
					t.Errorf("%d pages free: documents changed:\n%s", free, cmp.Diff(documents, now))
				}
				n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
				n.flush(t)
				n.invoke(t, invocation{verb: "ADD", conf: first}).want(t, 0)
			}
			if err := os.Remove(ballast); err != nil {
				t.Fatal(err)
			}
			n.addAndCheck(t, first)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			n.wantJumps(t, "SECOND", 0, 0)
			if unknown := n.unknownFiles(t); len(unknown) > 0 {
				t.Errorf("%d pages free: left over: %q", free, unknown)
			}
		}
		if failures == 0 || failures == 6 {
			t.Errorf("%d of 6 failed for want of room", failures)
		}
	})
}

// TestFlush: somebody takes everything away, in every way that there is, and
// the next ADD brings ours back.
func TestFlush(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"enableIPv6": true})
		program := n.backend.variant
		if program == "" {
			program = "nft"
		}
		for name, flush := range map[string]func(){
			"nft flush ruleset": func() { n.tool(t, "nft", "flush", "ruleset") },
			"iptables -F": func() {
				for _, f := range families() {
					n.tool(t, f[0]+"-"+program, "-t", "nat", "-F")
				}
			},
			"iptables -F -X": func() {
				for _, f := range families() {
					n.tool(t, f[0]+"-"+program, "-t", "nat", "-F")
					n.tool(t, f[0]+"-"+program, "-t", "nat", "-X")
				}
			},
			"nft flush ruleset ip": func() { n.tool(t, "nft", "flush", "ruleset", "ip") },
		} {
			t.Run(name, func(t *testing.T) {
				n.addAndCheck(t, conf).noWarnings(t)
				flush()
				n.addAndCheck(t, conf).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			})
		}
		t.Run("and the state with it", func(t *testing.T) {
			n.flush(t)
			if err := os.WriteFile(n.document(t, "podnet"), []byte(`{"schema":2,"sou`), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(n.dataDir, "record.json"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			n.addAndCheck(t, conf)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		})
	})
}

// TestFirewallReload does as firewalls do: all rules go, and those come back that were
// saved before ours were there, or while ours were older.
func TestFirewallReload(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.addThirdPartyRules(t)
		save := func() (restore func()) {
			saved := map[string]string{}
			for _, save := range saveCommands() {
				saved[strings.TrimSuffix(save, "save")+"restore"] = n.tool(t, save)
			}
			tables := "flush ruleset\n"
			for _, f := range families() {
				tables += n.tool(t, "nft", "list", "table", f[1], "stranger")
				if strings.Contains(n.tool(t, "nft", "list", "tables"), "table "+f[1]+" ip-masq\n") {
					tables += n.tool(t, "nft", "list", "table", f[1], "ip-masq")
				}
			}
			return func() {
				n.feed(t, tables, "nft", "-f", "-")
				for restore, text := range saved {
					n.feed(t, text, restore) // which flushes what it restores
				}
			}
		}
		withoutUs := save()
		conf := n.conf(t, "podnet", object{"enableIPv6": true})
		n.addAndCheck(t, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"192.0.2.0/24"}}))
		older := save()
		n.addAndCheck(t, conf)
		for name, restore := range map[string]func(){"without us": withoutUs, "with what we had": older} {
			t.Run(name, func(t *testing.T) {
				restore()
				others := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101)
				n.addAndCheck(t, conf).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
				if d := cmp.Diff(others, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
					t.Errorf("rules of others changed:\n%s", d)
				}
			})
		}
	})
}

// TestUnexpectedObjects: what else stands in our tables goes with the next ADD, whatever
// sort of object it is; tables of others may have nearly the same name.
func TestUnexpectedObjects(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.feed(t, "table inet ip-masq { chain postrouting { type filter hook postrouting priority 0; accept; }; }\n"+
		"table ip ip-masq2 { set exempt-IP-MASQ-AGENT { type ipv4_addr; }; }\n", "nft", "-f", "-")
	conf := n.conf(t, "podnet", object{"enableIPv6": true})
	n.addAndCheck(t, conf)
	lines := func() []string {
		// A set that is replaced gets another name.
		text := strings.ReplaceAll(n.tool(t, "nft", "list", "table", "ip", "ip-masq"), "exempt-IP-MASQ-AGENT.2", "exempt-IP-MASQ-AGENT")
		all := strings.Split(text, "\n")
		slices.Sort(all) // of objects the order has no meaning, and of rules CHECK tells
		return all
	}
	right, others := lines(), n.thirdPartyRuleset(t)
	for name, script := range map[string]string{
		"a rule before the jump":   "insert rule ip ip-masq postrouting ip daddr 192.0.2.1 accept",
		"a rule behind the jump":   "add rule ip ip-masq postrouting counter",
		"a rule in our chain":      "insert rule ip ip-masq masq-IP-MASQ-AGENT tcp dport 25 drop",
		"a set":                    "add set ip ip-masq s { type ipv4_addr; }",
		"a set with elements":      "add set ip ip-masq s { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }",
		"a map":                    "add map ip ip-masq m { type ipv4_addr : verdict; }",
		"a counter":                "add counter ip ip-masq c",
		"a quota":                  "add quota ip ip-masq q { over 1 mbytes; }",
		"a chain":                  "add chain ip ip-masq c",
		"a chain that is led to":   "add chain ip ip-masq c; add rule ip ip-masq c counter; add rule ip ip-masq masq-IP-MASQ-AGENT jump c",
		"a set that is used":       "add set ip ip-masq s { type ipv4_addr; }; insert rule ip ip-masq postrouting ip saddr @s accept",
		"a counter that is used":   "add counter ip ip-masq c; insert rule ip ip-masq postrouting counter name c",
		"a base chain":             "add chain ip ip-masq c { type filter hook postrouting priority 0; policy drop; }",
		"a chain in another table": "add chain ip6 ip-masq c { type nat hook postrouting priority 0; }",
		"a chain of an old name":   "add chain ip ip-masq masq-OLD; add rule ip ip-masq postrouting jump masq-OLD",
		"a dormant table":          "add table ip ip-masq { flags dormant; }",
		"another priority":         "delete chain ip ip-masq postrouting; add chain ip ip-masq postrouting { type nat hook postrouting priority 50; }",
		"another policy":           "add chain ip ip-masq postrouting { policy drop; }",
		"no base chain":            "flush chain ip ip-masq postrouting; delete chain ip ip-masq postrouting; add chain ip ip-masq postrouting; add rule ip ip-masq postrouting jump masq-IP-MASQ-AGENT",
		"a set of another type": "flush chain ip ip-masq masq-IP-MASQ-AGENT; delete set ip ip-masq exempt-IP-MASQ-AGENT; " +
			"add set ip ip-masq exempt-IP-MASQ-AGENT { type ipv4_addr . inet_service; }",
	} {
		t.Run(name, func(t *testing.T) {
			n.feed(t, script, "nft", "-f", "-")
			n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, "rules differ from what is desired:")
			n.addAndCheck(t, conf).noWarnings(t)
			if d := cmp.Diff(right, lines()); d != "" {
				t.Errorf("table: %s", d)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			if now := n.thirdPartyRuleset(t); now != others {
				t.Errorf("rules of others changed:\n%s", cmp.Diff(others, now))
			}
		})
	}
}
