// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// both makes a directory with the programs of both variants by their own names,
// and plain names for the given one, and returns it as a PATH.
func (n *node) linkBothVariants(t *testing.T, plain string) string {
	t.Helper()
	dir := filepath.Join(n.dir, "both-"+plain)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	link := func(program, name string) {
		path, err := exec.LookPath(program)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range families() {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, variant := range []string{"nft", "legacy"} {
				link(f[0]+"-"+variant+suffix, f[0]+"-"+variant+suffix)
			}
			if plain != "" {
				link(f[0]+"-"+plain+suffix, f[0]+suffix)
			}
		}
	}
	return dir
}

// owned is what the record says that we own, as chain backend variant.
func (n *node) ownedChains(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, o := range n.load(t).Record.Chains {
		all = append(all, strings.TrimSpace(strings.Join([]string{o.Chain, string(o.Family), string(o.Backend), o.Variant}, " ")))
	}
	return all
}

func (n *node) wantOwnedChains(t *testing.T, want ...string) {
	t.Helper()
	if d := cmp.Diff(want, n.ownedChains(t)); d != "" {
		t.Errorf("record: %s", d)
	}
}

// TestBackendChange: when backend, chain name or families change, what we had
// before goes once the new rules stand, and of others not a letter.
func TestBackendChange(t *testing.T) {
	t.Parallel()
	for _, from := range backends() {
		for _, to := range backends() {
			if from.setting == to.setting {
				continue
			}
			t.Run(from.name+" to "+to.name, func(t *testing.T) {
				n := newNode(t, from)
				n.addThirdPartyRules(t)
				others := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.addAndCheck(t, n.conf(t, "podnet", object{"enableIPv6": true}))
				n.path = n.linkBothVariants(t, to.variant)
				conf := n.conf(t, "podnet", object{"enableIPv6": true, "backend": to.setting})
				n.addAndCheck(t, conf).noWarnings(t)
				kind := strings.TrimSpace(to.setting + " " + to.variant)
				n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+kind, "IP-MASQ-AGENT ipv6 "+kind)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 1) // of all forms together
				if from.setting == "nftables" && strings.Contains(n.ruleset(t), "ip-masq {") {
					t.Errorf("tables of ip-masq are left:\n%s", n.ruleset(t))
				}
				if d := cmp.Diff(others, n.thirdPartyRuleset(t, "IP-MASQ-AGENT")); d != "" {
					t.Errorf("rules of others changed:\n%s", d)
				}
			})
		}
	}
}

func TestChainNameChange(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.addThirdPartyRules(t)
		others := n.thirdPartyRuleset(t, "OLD", "NEW")
		kind := " " + strings.TrimSpace(n.backend.setting+" "+n.backend.variant)
		n.addAndCheck(t, n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "OLD"}))
		n.addAndCheck(t, n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "NEW"})).noWarnings(t)
		n.wantNoChain(t, "OLD")
		n.wantJumps(t, "NEW", 1, 1)
		n.wantOwnedChains(t, "NEW ipv4"+kind, "NEW ipv6"+kind)
		// IPv6 is given up, and then the sources that another chain is for.
		n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "NEW"})).noWarnings(t)
		n.wantJumps(t, "NEW", 1, 0)
		n.wantOwnedChains(t, "NEW ipv4"+kind)
		n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "OLD", "sourceCIDRs": []string{"10.2.0.0/16", "10.3.0.0/16"}})).noWarnings(t)
		n.wantJumps(t, "NEW", 1, 0)
		if n.backend.variant != "" { // a jump for each source; nftables has a set of them
			n.wantJumps(t, "OLD", 2, 0)
		}
		n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "NEW"})).noWarnings(t)
		n.wantNoChain(t, "OLD")
		n.wantJumps(t, "NEW", 1, 0)
		if d := cmp.Diff(others, n.thirdPartyRuleset(t, "OLD", "NEW")); d != "" {
			t.Errorf("rules of others changed:\n%s", d)
		}
	})
}

// TestUnremovableChain: what cannot be removed makes no ADD fail, and is tried
// once.
func TestUnremovableChain(t *testing.T) {
	t.Parallel()
	for _, from := range backends()[1:] {
		t.Run(from.name, func(t *testing.T) {
			n := newNode(t, from)
			n.addAndCheck(t, n.conf(t, "podnet", nil))
			n.path = "/nonexistent"
			conf := n.conf(t, "podnet", object{"backend": "nftables"})
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, "remove chain IP-MASQ-AGENT (ipv4) from iptables ("+from.variant+")", "install iptables")
			n.addAndCheck(t, conf).noWarnings(t)
			stuck := store.OwnedChain{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.IPTables, Variant: from.variant, Stuck: true}
			owned := store.OwnedChain{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.NFTables}
			if d := cmp.Diff([]store.OwnedChain{owned, stuck}, n.load(t).Record.Chains); d != "" {
				t.Errorf("record: %s", d)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 2, 0)
			generation := n.generation(t)
			n.addAndCheck(t, conf).noWarnings(t)
			if now := n.generation(t); now != generation {
				t.Errorf("generation moved from %d to %d", generation, now)
			}
		})
	}
}

// auto is a situation in which backend auto has to choose.
type autoCase struct {
	name         string
	prepare      func(t *testing.T, n *node)
	plainVariant string // the variant of the program called iptables; "-": PATH has no programs
	want         string
}

func autoCases() []autoCase {
	hint := func(variant, chain string) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			n.feed(t, "*mangle\n:"+chain+" - [0:0]\nCOMMIT\n", "iptables-"+variant+"-restore", "--noflush")
		}
	}
	agent := func(variant string) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -j MASQUERADE\nCOMMIT\n", "iptables-"+variant+"-restore", "--noflush")
		}
	}
	nothing := func(*testing.T, *node) {}
	ours := func(t *testing.T, n *node) {
		n.feed(t, "table ip ip-masq { chain postrouting { type nat hook postrouting priority 101; }; chain masq-IP-MASQ-AGENT {}; }", "nft", "-f", "-")
	}
	return []autoCase{
		{"no programs", nothing, "-", "nftables"},
		{"plain iptables is nft", nothing, "nft", "iptables nft"},
		{"plain iptables is legacy", nothing, "legacy", "iptables legacy"},
		{"no plain iptables", nothing, "", "iptables nft"},
		{"kubelet's hint is in legacy", hint("legacy", "KUBE-IPTABLES-HINT"), "nft", "iptables legacy"},
		{"kubelet's canary is in nft", hint("nft", "KUBE-KUBELET-CANARY"), "legacy", "iptables nft"},
		{"an agent's chain is in legacy", agent("legacy"), "nft", "iptables legacy"},
		{"an agent's chain is in nft", agent("nft"), "legacy", "iptables nft"},
		{"an agent's chain that nobody can write", agent("legacy"), "-", "nftables"},
		{"our chain is in nftables", ours, "nft", "nftables"},
	}
}

func TestBackendAuto(t *testing.T) {
	t.Parallel()
	for _, a := range autoCases() {
		t.Run(a.name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			a.prepare(t, n)
			if a.plainVariant != "-" {
				n.path = n.linkBothVariants(t, a.plainVariant)
			}
			conf := n.conf(t, "podnet", object{"backend": "auto"})
			n.addAndCheck(t, conf)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+a.want)
			// What is chosen is recorded, and stays whatever is there later.
			n.path = filepath.Join(n.dir, "bin") + ":/usr/sbin"
			n.addAndCheck(t, n.conf(t, "podnet", object{"backend": nil})).noWarnings(t)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+a.want)
		})
	}
}

// TestBackendAutoChoosesAgain where what is recorded cannot be run any more, or cannot
// do it from the start.
func TestBackendAutoChoosesAgain(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			conf := n.conf(t, "podnet", object{"backend": nil})
			n.addAndCheck(t, conf)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 iptables "+f.variant)
			n.flush(t)
			n.path = "/nonexistent"
			n.addAndCheck(t, conf)
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0).noWarnings(t)
			if owned := n.ownedChains(t); len(owned) == 0 || owned[0] != "IP-MASQ-AGENT ipv4 nftables" {
				t.Errorf("record: %q", owned)
			}
		})
	}
	t.Run("iptables that fails", func(t *testing.T) {
		n := newNode(t, backends()[0])
		for _, name := range []string{"iptables", "ip6tables"} {
			script := "#!/bin/sh\n[ \"$1\" = --version ] && echo 'iptables v1.8.9 (nf_tables)' && exit\necho 'no xt modules here' >&2\nexit 1\n"
			if err := os.WriteFile(filepath.Join(n.path, name), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"}))
		n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 nftables")
	})
	t.Run("iptables in a directory of others", func(t *testing.T) {
		n := newNode(t, backends()[1])
		if err := os.Chmod(n.path, 0o777); err != nil {
			t.Fatal(err)
		}
		n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"}))
		n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 nftables")
		n.removeRulesAndState(t)
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 100, "writable by others")
	})
}

// TestWarningForManyPrefixes: iptables has to walk through a list, and says so where it is
// long and what helps; once, when it is written.
func TestWarningForManyPrefixes(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, count := range []int{60, 70, 300} {
			var cidrs []string
			for i := range count {
				cidrs = append(cidrs, fmt.Sprintf("10.%d.%d.0/25", i/256, i%256))
			}
			conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": cidrs, "cidrLimit": count})
			a := n.addAndCheck(t, conf)
			if count <= 64 || n.backend.variant == "" {
				a.noWarnings(t)
			} else {
				a.want(t, 0, "chain IP-MASQ-AGENT has ", " prefixes, and iptables evaluates these rules one by one for each new connection", "nftables")
			}
			n.addAndCheck(t, conf).noWarnings(t)
		}
	})
}
