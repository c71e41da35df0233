// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestMain(m *testing.M) {
	if program := os.Getenv(parentVariable); program != "" {
		_, err := runner{time.Minute}.run(context.Background(), nil, nil, program)
		fmt.Println(err)
		os.Exit(1)
	}
	if directory := os.Getenv(probeVariable); directory != "" {
		fmt.Println(probeIn(directory))
		os.Exit(1)
	}
	if program := os.Getenv(markVariable); program != "" {
		fmt.Println(markAndWait(program, os.Getenv(markPipeVariable)))
		os.Exit(1)
	}
	os.Exit(sandbox.Run(m))
}

const owner = "/var/lib/cni/ip-masq"

var isolate = sandbox.NetworkNamespace

// node is one variant of iptables in an empty network namespace.
type node struct {
	*testing.T
	*backend
	driver *Driver
	writes int // runs of iptables-restore by the backend
}

// inEachVariant runs the test in both variants.
func inEachVariant(t *testing.T, test func(*node)) {
	for _, variant := range variants() {
		t.Run(variant, func(t *testing.T) {
			test(newNode(t, variant))
		})
	}
}

func newNode(t *testing.T, variant string) *node {
	t.Helper()
	isolate(t)
	n := &node{T: t, driver: New(os.Getenv("PATH"))}
	opened := assert.Must(n.driver.Open(netfilter.Choice{Backend: policy.IPTables, Variant: variant}))(t)
	n.backend = opened.(*backend)
	n.beforeRestore(func() error {
		n.writes++
		return nil
	})
	return n
}

// beforeRestore makes the backend call the function before it runs iptables-restore,
// which then fails with the function's error.
func (n *node) beforeRestore(body func() error) {
	run := n.programs.run
	n.programs.run = func(ctx context.Context, held *os.File, input []byte, path string, args ...string) ([]byte, error) {
		if strings.HasSuffix(path, "-restore") {
			if err := body(); err != nil {
				return nil, err
			}
		}
		return run(ctx, held, input, path, args...)
	}
}

// command runs a program of the variant: "", "-restore" or "-save".
func (n *node) command(f policy.Family, suffix, stdin string, args ...string) (string, error) {
	c := exec.Command(baseName(f)+"-"+n.choice.Variant+suffix, args...)
	c.Stdin = strings.NewReader(stdin)
	out, err := c.CombinedOutput()
	return string(out), err
}

// iptables runs a command in table nat.
func (n *node) iptables(f policy.Family, command string) {
	n.Helper()
	if out, err := n.command(f, "", "", append([]string{"-t", "nat"}, strings.Fields(command)...)...); err != nil {
		n.Fatalf("iptables %s: %v: %s", command, err, out)
	}
}

// load gives lines to iptables-restore.
func (n *node) load(f policy.Family, lines ...string) {
	n.Helper()
	input := "*nat\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	if out, err := n.command(f, "-restore", input, "--noflush"); err != nil {
		n.Fatalf("iptables-restore: %v: %s\n%s", err, out, input)
	}
}

// save returns all of the tables, without the comments, which hold the time.
func (n *node) save(f policy.Family) string {
	n.Helper()
	out, err := n.command(f, "-save", "")
	if err != nil {
		n.Fatalf("iptables-save: %v: %s", err, out)
	}
	var kept []string
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "#") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

func refs(rs policy.Ruleset) []policy.ChainFamily {
	var out []policy.ChainFamily
	for _, c := range rs.Chains {
		out = append(out, policy.ChainFamily{Chain: c.Name, Family: c.Family})
	}
	return out
}

func bothFamilies(names ...string) []policy.ChainFamily {
	var out []policy.ChainFamily
	for _, f := range policy.Families() {
		for _, name := range names {
			out = append(out, policy.ChainFamily{Chain: name, Family: f})
		}
	}
	return out
}

func (n *node) observe(chains []policy.ChainFamily) policy.Ruleset {
	n.Helper()
	observed := assert.Must(n.Observe(n.Context(), chains))(n)
	return observed.Rules
}

func (n *node) apply(rs policy.Ruleset) {
	n.Helper()
	assert.NoError(n, n.Apply(n.Context(), rs, netfilter.Observation{}, nil))
}

// holds fails unless the kernel has exactly the desired chains.
func (n *node) holds(want policy.Ruleset) {
	n.Helper()
	got := n.observe(refs(want))
	if d := policy.Compare(want, got); len(d) > 0 {
		n.Fatalf("not as desired:\n%s", d)
	}
	for _, c := range got.Chains {
		if w := want.Find(c.Family, c.Name); w.Owner != c.Owner {
			n.Fatalf("owner of %s is %v, not %v", c.Name, c.Owner, w.Owner)
		}
	}
}

// idle fails if the function runs iptables-restore or commits to nf_tables.
func (n *node) idle(what string, body func()) {
	n.Helper()
	writes, before := n.writes, n.generation()
	body()
	assert.Equal(n, what+": runs of iptables-restore", n.writes, writes)
	assert.Equal(n, what+": generation of nf_tables", n.generation(), before)
}

// agreesWithListing fails if a rule of the chains, or a jump to them, was decoded as
// another one than `iptables -S` prints. It returns how many were recognized.
func (n *node) agreesWithListing(names ...string) (recognized int) {
	n.Helper()
	for _, f := range policy.Families() {
		t := assert.Must(n.read(f, names))(n)
		listed := assert.Must(n.programs.list(n.Context(), f, n.choice.Variant, postrouting))(n)
		jumps := assert.Must(t.jumpLines(listed))(n)
		for _, c := range t.Chains {
			lines, err := n.programs.list(n.Context(), f, n.choice.Variant, c.Name)
			if err != nil || len(lines) != len(c.Rules) || len(jumps[c.Name]) != len(c.Jumps) {
				n.Fatalf("%s: %d rules and %d jumps, shown are %q and %q: %v", c.Name, len(c.Rules), len(c.Jumps), lines, jumps[c.Name], err)
			}
			for i, r := range append(c.Rules, c.Jumps...) {
				if r.Verdict == policy.Unrecognized {
					continue
				}
				recognized++
				chain, line := c.Name, append(lines, jumps[c.Name]...)[i]
				if i >= len(c.Rules) {
					chain = postrouting
				}
				if written := ruleCommand(r, chain, c.Name, ""); !slices.Equal(options(written), options(line)) {
					n.Fatalf("%s: decoded as %q", line, written)
				}
			}
		}
	}
	return recognized
}

// options returns the options of a rule in some order, without comments, quotes and
// the names of matches.
func options(line string) []string {
	line = regexp.MustCompile(` --comment ("(\\.|[^"\\])*"|\S+)`).ReplaceAllString(line, "")
	line = regexp.MustCompile(` -m (comment|addrtype|statistic)`).ReplaceAllString(line, "")
	line = strings.NewReplacer(" ! --", " !--", `"`, "", `\`, "").Replace(line)
	words := strings.Fields(line)
	for i, w := range words {
		if p, err := netip.ParsePrefix(w); err == nil {
			words[i] = p.String() // iptables prints ::1.2.3.4/128
		}
	}
	return slices.Sorted(slices.Values(words))
}

// generation is the number that each commit to nf_tables raises.
func (n *node) generation() uint32 {
	n.Helper()
	return assert.Must(n.driver.nft.conn.Generation())(n)
}
