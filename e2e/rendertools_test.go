// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// render returns the output of `render`.
func (n *node) render(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, append([]string{"render"}, args...)...)
	if code != 0 || warningsIn(stderr) != "" {
		t.Fatalf("render %v: exit code %d\n%s", args, code, stderr)
	}
	return stdout
}

// loadRendered loads the rendered rules with nft or iptables-restore, or only checks them with the
// tool's dry run.
func (n *node) loadRendered(t *testing.T, try bool) {
	t.Helper()
	if n.backend.variant == "" {
		args := []string{"-f", "-"}
		if try {
			args = append([]string{"-c"}, args...)
		}
		n.feed(t, n.render(t), "nft", args...)
		return
	}
	for i, f := range families() {
		args := []string{"--noflush"}
		if try {
			args = append(args, "--test")
		}
		n.feed(t, n.render(t, "--family", []string{"ipv4", "ipv6"}[i]), f[0]+"-"+n.backend.variant+"-restore", args...)
	}
}

// wantInSync fails the test unless check reports the rules in sync and they name the dataDir.
func (n *node) wantInSync(t *testing.T, chains ...string) {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, "check")
	if code != 0 || warningsIn(stderr) != "" {
		t.Fatalf("check: exit code %d\n%s%s\n%s", code, stdout, stderr, n.ruleset(t))
	}
	for _, chain := range chains {
		wantText(t, "check", stdout, chain+" (ipv4, ", chain+" (ipv6, ")
	}
	wantText(t, "the rules", n.ruleset(t), "keeps its state in "+n.dataDir)
}

// TestRendered loads the output of render with nft or iptables-restore on an empty node. It checks
// that check reports no difference and that once makes the same rules.
func TestRendered(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string]object{
		"defaults": {"enableIPv6": true},
		"nothing exempt": dualStack(object{"nonMasqueradeCIDRs": []string{}, "masqLinkLocal": true, "masqLinkLocalIPv6": true,
			"randomFully": false}),
		"everything": dualStack(object{
			"masqueradeCIDRs":          []string{"10.96.0.0/12", "10.96.1.1/32", "fd00:96::/32"},
			"nonMasqueradeSourceCIDRs": []string{"10.1.9.0/24", "fd00:1::9/128"},
			"sourceCIDRs":              []string{"10.1.0.0/16", "10.3.0.0/16", "fd00:1::/64"},
			"outputInterfaces":         []string{"eth+", "wg0"},
			"masqueradeHost":           false,
			"toPorts":                  "1024-29999,32768-60000,61000",
		}),
	} {
		t.Run(name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				empty := n.ruleset(t)
				n.conflist(t, "podnet", keys)
				n.agentFile(t, "ip-masq-agent", "masqChain: \"10.set\"\nenableIPv6: true\nnonMasqueradeCIDRs: [192.0.2.0/24, \"2001:db8::/32\"]\n")

				n.loadRendered(t, true)
				if now := n.ruleset(t); now != empty && n.backend.variant == "" {
					t.Errorf("a dry run made rules:\n%s", now)
				}
				n.loadRendered(t, false)
				n.wantInSync(t, "IP-MASQ-AGENT", "10.set")
				if _, err := os.Lstat(n.dataDir); !os.IsNotExist(err) {
					t.Errorf("render or check wrote to %s: %v", n.dataDir, err)
				}
				loaded := n.ruleset(t)

				n.loadRendered(t, false)
				if n.backend.variant == "" { // the script recreates the tables
					n.wantInSync(t, "IP-MASQ-AGENT", "10.set")
				} else { // the script appends the jumps again, and says so
					wantText(t, "the output of render", n.render(t), "# Each loading appends the jumps again")
					n.reconcileOnce(t)
				}
				wantSame(t, "rules that were loaded twice", n.ruleset(t), loaded)

				generation := n.generation(t)
				n.reconcileOnce(t)
				wantSame(t, "generation", n.generation(t), generation)
				wantSame(t, "rules after once", n.ruleset(t), loaded)
				n.cleanup(t)
				n.reconcileOnce(t)
				// check compares the order within chains; the order of chains does not matter.
				wantSame(t, "rules made by once, not loaded,", slices.Sorted(strings.Lines(n.ruleset(t))), slices.Sorted(strings.Lines(loaded)))
			})
		})
	}
}
