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

// TestDiskFull leaves 0 to 5 pages free on the file system of the dataDir. It checks that an ADD
// with a new document either succeeds, or fails and changes neither rules nor documents.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		const page = 4096
		disk := filepath.Join(n.dir, "disk")
		n.dataDir = filepath.Join(disk, "data")
		must(t, os.Mkdir(disk, 0o700))
		must(t, syscall.Mount("full", disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", 16*page)))
		t.Cleanup(func() {
			if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		ballast := filepath.Join(disk, "ballast")
		fill := func(free int64) {
			t.Helper()
			f, err := os.Create(ballast)
			must(t, err)
			size := int64(0)
			for err == nil {
				_, err = f.Write(make([]byte, page))
				size += page
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			must(t, errors.Join(f.Truncate(max(0, size-page-free*page)), f.Close()))
		}
		fill(0)
		first := n.conf(t, "podnet", nil)
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: first}).want(t, 100, "no space left on device", "free space or inodes on its file system")
		n.invoke(t, invocation{verb: "STATUS", conf: first}).want(t, 50, "no space left on device")
		if after := n.ruleset(t); n.backend.variant != "legacy" && after != before { // iptables-legacy creates an empty table when it is read
			t.Errorf("rules changed:\n%s", after)
		}
		must(t, os.Remove(ballast))
		n.addAndCheck(t, first)
		failures := 0
		for free := range int64(6) {
			fill(free)
			rules, documents := n.ruleset(t), n.documentStamps(t)
			// This ADD finds correct rules. It needs space only for the record of its pod, without which it warns.
			other := n.conf(t, "podnet", object{"prevResult": resultWith(fmt.Sprintf("10.1.0.%d/16", 100+free))})
			a := n.invoke(t, invocation{verb: "ADD", conf: other, id: fmt.Sprint("pod", free)}).want(t, 0)
			if warned := strings.Contains(a.stderr, "cannot record the pod: no space left on device in "+n.dataDir+"; free space or inodes"); warned != (free == 0) {
				t.Errorf("%d pages free: %s", free, a.stderr)
			}
			second := n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "SECOND", "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}})
			a = n.invoke(t, invocation{verb: "ADD", conf: second})
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
			must(t, os.Remove(ballast))
			n.addAndCheck(t, first)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			n.wantJumps(t, "SECOND", 0, 0)
			if unknown := n.unknownFiles(t); len(unknown) > 0 {
				t.Errorf("%d pages free: unexpected files: %q", free, unknown)
			}
		}
		if failures == 0 || failures == 6 {
			t.Errorf("%d of 6 ADDs failed for lack of space, want some", failures)
		}
	})
}

// TestFlush checks that the next ADD restores the rules after each way to flush the ruleset.
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
		t.Run("nft flush ruleset with damaged state", func(t *testing.T) {
			n.flush(t)
			must(t, os.WriteFile(n.document(t, "podnet"), []byte(`{"schema":`), 0o600))
			must(t, os.WriteFile(filepath.Join(n.dataDir, "record.json"), nil, 0o600))
			n.addAndCheck(t, conf)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		})
	})
}

// TestFirewallReload flushes the ruleset and restores one that was saved before ip-masq had rules,
// or when it had older ones, as firewall services do. It checks that the next ADD corrects the
// owned rules only.
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
				tables += n.tool(t, "nft", "list", "table", f[1], "thirdparty")
				if strings.Contains(n.tool(t, "nft", "list", "tables"), "table "+f[1]+" ip-masq\n") {
					tables += n.tool(t, "nft", "list", "table", f[1], "ip-masq")
				}
			}
			return func() {
				n.feed(t, tables, "nft", "-f", "-")
				for restore, text := range saved {
					n.feed(t, text, restore) // the program flushes the tables first
				}
			}
		}
		withoutRules := save()
		conf := n.conf(t, "podnet", object{"enableIPv6": true})
		n.addAndCheck(t, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"192.0.2.0/24"}}))
		older := save()
		n.addAndCheck(t, conf)
		for name, restore := range map[string]func(){"without owned rules": withoutRules, "with older owned rules": older} {
			t.Run(name, func(t *testing.T) {
				restore()
				thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101)
				n.addAndCheck(t, conf).noWarnings(t)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
				if d := cmp.Diff(thirdParty, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
					t.Errorf("third-party rules changed:\n%s", d)
				}
			})
		}
	})
}

// TestUnexpectedObjects checks that an ADD removes unexpected objects of every kind from the owned
// tables, and keeps tables with similar names.
func TestUnexpectedObjects(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.feed(t, "table inet ip-masq { chain postrouting { type filter hook postrouting priority 0; accept; }; }\n"+
		"table ip ip-masq2 { set exempt-IP-MASQ-AGENT { type ipv4_addr; }; }\n", "nft", "-f", "-")
	conf := n.conf(t, "podnet", object{"enableIPv6": true})
	n.addAndCheck(t, conf)
	lines := func() []string {
		// A replaced set gets another name.
		text := strings.ReplaceAll(n.tool(t, "nft", "list", "table", "ip", "ip-masq"), "exempt-IP-MASQ-AGENT.2", "exempt-IP-MASQ-AGENT")
		all := strings.Split(text, "\n")
		slices.Sort(all) // the order of objects has no effect; CHECK verifies that of rules
		return all
	}
	right, thirdParty := lines(), n.thirdPartyRuleset(t)
	for name, script := range map[string]string{
		"a rule before the jump":     "insert rule ip ip-masq postrouting ip daddr 192.0.2.1 accept",
		"a rule after the jump":      "add rule ip ip-masq postrouting counter",
		"a rule in the owned chain":  "insert rule ip ip-masq masq-IP-MASQ-AGENT tcp dport 25 drop",
		"a set":                      "add set ip ip-masq s { type ipv4_addr; }",
		"a set with elements":        "add set ip ip-masq s { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }",
		"a map":                      "add map ip ip-masq m { type ipv4_addr : verdict; }",
		"a counter":                  "add counter ip ip-masq c",
		"a quota":                    "add quota ip ip-masq q { over 1 mbytes; }",
		"a chain":                    "add chain ip ip-masq c",
		"a chain with a jump to it":  "add chain ip ip-masq c; add rule ip ip-masq c counter; add rule ip ip-masq masq-IP-MASQ-AGENT jump c",
		"a set that is used":         "add set ip ip-masq s { type ipv4_addr; }; insert rule ip ip-masq postrouting ip saddr @s accept",
		"a counter that is used":     "add counter ip ip-masq c; insert rule ip ip-masq postrouting counter name c",
		"a base chain":               "add chain ip ip-masq c { type filter hook postrouting priority 0; policy drop; }",
		"a chain in another table":   "add chain ip6 ip-masq c { type nat hook postrouting priority 0; }",
		"a chain of a previous name": "add chain ip ip-masq masq-OLD; add rule ip ip-masq postrouting jump masq-OLD",
		"a dormant table":            "add table ip ip-masq { flags dormant; }",
		"another priority":           "delete chain ip ip-masq postrouting; add chain ip ip-masq postrouting { type nat hook postrouting priority 50; }",
		"another policy":             "add chain ip ip-masq postrouting { policy drop; }",
		"no base chain":              "flush chain ip ip-masq postrouting; delete chain ip ip-masq postrouting; add chain ip ip-masq postrouting; add rule ip ip-masq postrouting jump masq-IP-MASQ-AGENT",
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
			if now := n.thirdPartyRuleset(t); now != thirdParty {
				t.Errorf("third-party rules changed:\n%s", cmp.Diff(thirdParty, now))
			}
		})
	}
}
