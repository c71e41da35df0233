// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// identity maps one ID of a user namespace to itself.
func identity(id int) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: id, HostID: id, Size: 1}}
}

// saveCommands returns the programs that print the rules of both iptables variants.
func saveCommands() []string {
	return []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"}
}

// ruleset returns all rules in the node's kernel, without counters.
func (n *node) ruleset(t *testing.T) string {
	t.Helper()
	return n.tool(t, "nft", "-s", "list", "ruleset") + n.saved(t)
}

// saved returns the rules of both iptables variants, without counters.
func (n *node) saved(t *testing.T) string {
	t.Helper()
	moving := regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)
	var b strings.Builder
	for _, save := range saveCommands() {
		b.WriteString(save + "\n" + moving.ReplaceAllString(n.tool(t, save), ""))
	}
	return b.String()
}

// snapshot is everything that an ADD can change: rules and state.
type snapshot struct{ rules, state string }

func (n *node) snapshot(t *testing.T) snapshot {
	t.Helper()
	return snapshot{n.ruleset(t), tree(t, n.dataDir)}
}

// unchanged fails the test if rules or state differ from before.
func (n *node) unchanged(t *testing.T, before snapshot) {
	t.Helper()
	after := n.snapshot(t)
	wantSame(t, "rules", after.rules, before.rules)
	wantSame(t, "state", after.state, before.state)
}

// wantSame fails the test if something is not as it was before, or as it should be.
func wantSame[T any](t *testing.T, what string, now, before T) {
	t.Helper()
	if d := cmp.Diff(before, now); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, abbreviate(d))
	}
}

// wantText fails the test unless a text has all of these parts.
func wantText(t *testing.T, what, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%s: no %q in:\n%s", what, p, abbreviate(text))
		}
	}
}

// generation returns the ruleset generation of nf_tables. Changes by iptables-legacy do not
// increment it.
func (n *node) generation(t *testing.T) uint32 {
	t.Helper()
	var generation uint32
	err := n.Node.Do(func() (err error) {
		var c nfnetlink.Conn
		generation, err = c.Generation()
		return errors.Join(err, c.Close())
	})
	must(t, err)
	return generation
}

// feed runs a program on the node with the input on its stdin. It fails the test if the program
// fails.
func (n *node) feed(t *testing.T, input, name string, args ...string) {
	t.Helper()
	c := n.Node.Command(n.timeout(t), name, args...)
	c.Stdin = strings.NewReader(input)
	if stdout, stderr, code := run(t, c); code != 0 {
		t.Fatalf("%s %s: exit code %d\n%s%s\n%s", name, strings.Join(args, " "), code, stdout, stderr, input)
	}
}

// alter changes the node's IPv4 rules with the program of its backend, one command per line.
func (n *node) alter(t *testing.T, iptables, nft string) {
	t.Helper()
	if n.backend.variant == "" {
		n.feed(t, nft, "nft", "-f", "-")
		return
	}
	for line := range strings.Lines(iptables) {
		n.tool(t, "iptables", append([]string{"-t", "nat"}, strings.Fields(line)...)...)
	}
}

// families returns the program prefixes of iptables with the families of nft.
func families() [][2]string { return [][2]string{{"iptables", "ip"}, {"ip6tables", "ip6"}} }

// jumps returns the jumps to an owned chain in all backends.
func (n *node) jumps(t *testing.T, chain string) (ipv4, ipv6 []string) {
	t.Helper()
	found := map[string][]string{}
	table := ""
	for line := range strings.Lines(n.tool(t, "nft", "-s", "list", "ruleset")) {
		line = strings.TrimSpace(line)
		if words := strings.Fields(line); len(words) == 4 && words[0] == "table" {
			table = words[1] + " " + words[2]
		}
		for _, f := range families() {
			if table == f[1]+" ip-masq" && strings.HasSuffix(line, "jump masq-"+chain) {
				found[f[0]] = append(found[f[0]], line)
			}
		}
	}
	for _, save := range saveCommands() {
		family, _, _ := strings.Cut(save, "-")
		// No -t option: it makes iptables-legacy create the table.
		for line := range strings.Lines(n.tool(t, save)) {
			if strings.HasPrefix(line, "-A POSTROUTING ") && strings.HasSuffix(line, "-j "+chain+"\n") {
				found[family] = append(found[family], save+": "+line)
			}
		}
	}
	return found["iptables"], found["ip6tables"]
}

// wantJumps fails the test unless the chain has the given number of jumps.
func (n *node) wantJumps(t *testing.T, chain string, ipv4, ipv6 int) {
	t.Helper()
	four, six := n.jumps(t, chain)
	if len(four) != ipv4 || len(six) != ipv6 {
		t.Fatalf("%d and %d jumps to %s, want %d and %d:\n%q\n%q\n%s", len(four), len(six), chain, ipv4, ipv6, four, six, n.ruleset(t))
	}
}

// flush removes all rules with the program of the node's backend.
func (n *node) flush(t *testing.T) {
	t.Helper()
	if n.backend.variant == "" {
		n.tool(t, "nft", "flush", "ruleset")
		return
	}
	for _, f := range families() {
		n.tool(t, f[0], "-t", "nat", "-F")
	}
}

// thirdPartyRuleset returns the ruleset without the owned tables and without lines that contain one
// of the chain names.
func (n *node) thirdPartyRuleset(t *testing.T, chains ...string) string {
	t.Helper()
	var kept []string
	skip := false
	for line := range strings.Lines(n.tool(t, "nft", "-s", "list", "ruleset")) {
		words := strings.Fields(line)
		if len(words) == 4 && words[0] == "table" {
			// The iptables programs print table nat in more detail.
			skip = words[2] == "ip-masq" || words[2] == "nat"
		}
		if !skip {
			kept = append(kept, line)
		}
	}
	for line := range strings.Lines(n.saved(t)) {
		if !slices.ContainsFunc(chains, func(c string) bool { return strings.Contains(line, c) }) {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// addThirdPartyRules adds third-party rules in every backend.
func (n *node) addThirdPartyRules(t *testing.T) {
	t.Helper()
	for i, f := range families() {
		net := []string{"192.0.2.0/24", "2001:db8:2::/48"}[i]
		host := []string{"10.1.0.9", "fd00:1::9"}[i]
		for _, variant := range []string{"nft", "legacy"} {
			n.feed(t, "*nat\n:KUBE-POSTROUTING - [0:0]\n"+
				"-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING\n"+
				"-A POSTROUTING -s "+net+" -j MASQUERADE\n"+
				"-A POSTROUTING -d "+net+" -m addrtype ! --dst-type LOCAL -j KUBE-POSTROUTING\n"+
				"-A PREROUTING -d "+host+" -p tcp -m tcp --dport 80 -j DNAT --to-destination "+host+"\n"+
				"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n"+
				"-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n"+
				"COMMIT\n*filter\n-A FORWARD -s "+net+" -j ACCEPT\nCOMMIT\n",
				f[0]+"-"+variant+"-restore", "--noflush")
		}
		n.feed(t, "table "+f[1]+" thirdparty {\n set s { type "+[]string{"ipv4_addr", "ipv6_addr"}[i]+"; flags interval; elements = { "+net+" } }\n"+
			" chain post { type nat hook postrouting priority 90; "+f[1]+" saddr @s masquerade comment \"not yours\"; }\n}\n", "nft", "-f", "-")
	}
}

// readOnly makes a directory read-only until the function is called.
func (n *node) readOnly(t *testing.T, dir string) (writable func()) {
	t.Helper()
	must(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	done := false
	writable = func() {
		if !done {
			done = true
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Errorf("unmount %s: %v", dir, err)
			}
		}
	}
	t.Cleanup(writable)
	n.remount(t, dir, unix.MS_RDONLY)
	return writable
}

// remount sets the flags of a mount for the test and for the node. New mounts propagate to the
// node; new flags do not.
func (n *node) remount(t *testing.T, dir string, flags uintptr) {
	t.Helper()
	remount := func() error {
		return unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|flags, "")
	}
	must(t, errors.Join(remount(), n.Node.Enclose(remount)))
}

// writeTempFile writes a file that all nodes see, for the duration of the test.
func writeTempFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		t.Fatal(err) // never write through a symbolic link
	}
	must(t, os.WriteFile(path, []byte(text), 0o644))
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
	})
}
