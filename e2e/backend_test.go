// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// linkBothVariants creates a directory with the programs of both iptables variants, and with plain
// names for the given variant. It returns the directory as a PATH.
func (n *node) linkBothVariants(t *testing.T, plain string) string {
	t.Helper()
	dir := filepath.Join(n.dir, "both-"+plain)
	must(t, os.Mkdir(dir, 0o755))
	link := func(program, name string) {
		path, err := exec.LookPath(program)
		if err == nil {
			err = os.Symlink(path, filepath.Join(dir, name))
		}
		must(t, err)
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

// ownedChains returns the owned chains of the record as "chain family backend variant".
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
	wantSame(t, "owned chains", n.ownedChains(t), want)
}

// TestBackendChange checks that ADD removes the owned chain from the previous backend, and leaves
// third-party rules unchanged.
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
				thirdParty := n.thirdPartyRuleset(t, "IP-MASQ-AGENT")
				n.addAndCheck(t, n.conf(t, "podnet", object{"enableIPv6": true}))
				n.path = n.linkBothVariants(t, to.variant)
				conf := n.conf(t, "podnet", object{"enableIPv6": true, "backend": to.setting})
				n.addAndCheck(t, conf).noWarnings(t)
				kind := strings.TrimSpace(to.setting + " " + to.variant)
				n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+kind, "IP-MASQ-AGENT ipv6 "+kind)
				n.wantJumps(t, "IP-MASQ-AGENT", 1, 1) // in all backends together
				if from.setting == "nftables" && strings.Contains(n.ruleset(t), "ip-masq {") {
					t.Errorf("tables of ip-masq remain:\n%s", n.ruleset(t))
				}
				wantSame(t, "third-party rules", n.thirdPartyRuleset(t, "IP-MASQ-AGENT"), thirdParty)
			})
		}
	}
}

// TestUnremovableChain checks that a chain that cannot be removed fails no ADD, and that the plugin
// tries to remove it only once.
func TestUnremovableChain(t *testing.T) {
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		n.addAndCheck(t, n.conf(t, "podnet", nil))
		n.path = "/nonexistent"
		conf := n.conf(t, "podnet", object{"backend": "nftables"})
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, "remove chain IP-MASQ-AGENT (ipv4) from iptables ("+n.backend.variant+")", "install iptables")
		n.addAndCheck(t, conf).noWarnings(t)
		stuck := store.OwnedChain{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.IPTables, Variant: n.backend.variant, RemovalFailed: true}
		owned := store.OwnedChain{Chain: policy.DefaultChain, Family: policy.IPv4, Backend: policy.NFTables}
		wantSame(t, "owned chains", n.load(t).Record.Chains, []store.OwnedChain{owned, stuck})
		n.wantJumps(t, "IP-MASQ-AGENT", 2, 0)
		generation := n.generation(t)
		n.addAndCheck(t, conf).noWarnings(t)
		wantSame(t, "generation", n.generation(t), generation)
		// The node is not ready for one reason, with what to do.
		n.conflist(t, "podnet", object{"backend": "nftables"})
		stdout, stderr, code := n.reconciler(t, "check", "-o", "json")
		var found struct{ Findings []diagnose.Finding }
		err := json.Unmarshal([]byte(stdout), &found)
		of := func(id string) int {
			return slices.IndexFunc(found.Findings, func(f diagnose.Finding) bool { return f.ID == id })
		}
		if i := of("backend"); err != nil || code == 0 || of("rules") >= 0 || i < 0 || len(found.Findings[i].Details) != 1 ||
			!strings.Contains(found.Findings[i].Details[0], "the image whose tag ends in -iptables") {
			t.Errorf("check: %d, %v\n%s%s", code, err, stdout, stderr)
		}
	})
}

// TestBackendOfALostRecord: where the record is lost, the chain in the kernel tells which backend it is in, also where that has
// lost its programs.
func TestBackendOfALostRecord(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"backend": nil})
		n.addAndCheck(t, n.conf(t, "podnet", object{"backend": n.backend.setting}))
		owned := n.ownedChains(t)
		must(t, os.Remove(filepath.Join(n.dataDir, "record.json")))
		path := n.path
		n.path = "/nonexistent"
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: "other"}).want(t, 0)
		assert.Equal(t, "record", n.ownedChains(t), owned)
		n.path = path
		n.addAndCheck(t, conf)
	})
}

// autoCase is a node on which backend auto chooses.
type autoCase struct {
	name         string
	prepare      func(t *testing.T, n *node)
	plainVariant string // variant of the program iptables; "-": no programs in PATH
	want         string
}

func autoCases() []autoCase {
	agent := func(variant string) func(*testing.T, *node) {
		return func(t *testing.T, n *node) {
			n.feed(t, "*nat\n:IP-MASQ-AGENT - [0:0]\n-A IP-MASQ-AGENT -j MASQUERADE\nCOMMIT\n", "iptables-"+variant+"-restore", "--noflush")
		}
	}
	none := func(*testing.T, *node) {}
	owned := func(t *testing.T, n *node) {
		n.feed(t, "table ip ip-masq { chain postrouting { type nat hook postrouting priority 101; }; chain masq-IP-MASQ-AGENT {}; }", "nft", "-f", "-")
	}
	kubeProxy := func(t *testing.T, n *node) { n.feed(t, kubeProxyNFT("ip", nil), "nft", "-f", "-") }
	return []autoCase{
		{"kube-proxy is in nftables", kubeProxy, "nft", "nftables"},
		{"kube-proxy is in nftables and an agent's chain in legacy", func(t *testing.T, n *node) {
			kubeProxy(t, n)
			agent("legacy")(t, n)
		}, "nft", "iptables legacy"},
		{"no programs", none, "-", "nftables"},
		{"plain iptables is legacy", none, "legacy", "iptables legacy"}, // pkg/netfilter/iptables tests which variant is chosen
		{"an agent's chain is in legacy", agent("legacy"), "nft", "iptables legacy"},
		{"an agent's chain is in nft", agent("nft"), "legacy", "iptables nft"},
		{"an agent's chain is in legacy, without programs", agent("legacy"), "-", "nftables"},
		{"the owned chain is in nftables", owned, "nft", "nftables"},
	}
}

// TestBackendAuto checks which backend auto chooses, and that later ADDs keep the recorded choice.
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
			// The choice is on record and stays when other programs are installed.
			n.path = filepath.Join(n.dir, "bin") + ":/usr/sbin"
			n.addAndCheck(t, n.conf(t, "podnet", object{"backend": nil})).noWarnings(t)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 "+a.want)
		})
	}
}

// TestBackendAutoChoosesOnce checks that auto keeps the backend of the first ADD of a boot, and names the key if that has lost
// its programs; and that it chooses none whose programs fail or are untrusted.
func TestBackendAutoChoosesOnce(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			conf := n.conf(t, "podnet", object{"backend": nil})
			n.addAndCheck(t, conf)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 iptables "+f.variant)
			n.flush(t)
			n.path = "/nonexistent"
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "install iptables")
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 iptables "+f.variant)
			nftables := n.conf(t, "podnet", object{"backend": "nftables"})
			n.addAndCheck(t, nftables)
			n.invoke(t, invocation{verb: "ADD", conf: nftables}).want(t, 0)
			if owned := n.ownedChains(t); len(owned) == 0 || owned[0] != "IP-MASQ-AGENT ipv4 nftables" {
				t.Errorf("record: %q", owned)
			}
		})
	}
	t.Run("failing iptables", func(t *testing.T) {
		n := newNode(t, backends()[0])
		for _, name := range []string{"iptables", "ip6tables"} {
			script := "#!/bin/sh\n[ \"$1\" = --version ] && echo 'iptables v1.8.9 (nf_tables)' && exit\necho 'no xt modules here' >&2\nexit 1\n"
			must(t, os.WriteFile(filepath.Join(n.path, name), []byte(script), 0o755))
		}
		n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"}))
		n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 nftables")
	})
	t.Run("iptables in a world-writable directory", func(t *testing.T) {
		n := newNode(t, backends()[1])
		must(t, os.Chmod(n.path, 0o777))
		n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"}))
		n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 nftables")
		n.removeRulesAndState(t)
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 100, "writable by others")
	})
}

// TestBackendAutoBesideBusyProgram checks that auto chooses no other backend while iptables is busy, and that ADD
// answers "try again later".
func TestBackendAutoBesideBusyProgram(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]string{
		"busy":   "echo 'iptables: Resource temporarily unavailable' >&2; exit 4",
		"killed": "kill -9 $$",
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[1])
			works := n.path
			n.path = filepath.Join(n.dir, "busy")
			must(t, os.Mkdir(n.path, 0o755))
			script := "#!/bin/sh\n[ \"$1\" = --version ] && echo 'iptables v1.8.9 (nf_tables)' && exit\n" + fails + "\n"
			must(t, os.WriteFile(filepath.Join(n.path, "iptables"), []byte(script), 0o755))
			conf := n.conf(t, "podnet", object{"backend": "auto"})
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 11, filepath.Join(n.path, "iptables"))
			n.path = works
			n.addAndCheck(t, conf)
			n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 iptables nft")
		})
	}
}

// TestWarningForManyPrefixes checks that ADD warns once about a long list in iptables and
// recommends nftables.
func TestWarningForManyPrefixes(t *testing.T) {
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
