// SPDX-License-Identifier: Apache-2.0

package diagnose_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	inIPTables = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	inNFTables = netfilter.Choice{Backend: policy.NFTables}
)

// node is what is known of a node: its sources, and what was read.
type node struct {
	sources []policy.Source
	view    *enforce.State
	finder  diagnose.OriginFinder
}

// newNode makes one whose kernel has all that is desired. Chains are kept in
// iptables, those that ask for it in nftables.
func newNode(sources ...policy.Source) *node {
	n := &node{sources: sources, view: &enforce.State{}}
	for _, p := range policy.Merge(sources) {
		choice := inIPTables
		if p.Backend.Value == policy.NFTables {
			choice = inNFTables
		}
		n.join(p, choice)
	}
	n.view.Guard.Desired = policy.DesiredGuards(n.view.Policies(), policy.OwnedBy("/state"))
	return n
}

func (n *node) join(p policy.Policy, c netfilter.Choice) {
	rules := func() policy.Ruleset {
		return policy.Desired([]policy.Policy{p}, policy.Layout{Sets: c == inNFTables}, policy.OwnedBy("/state"))
	}
	n.view.Chains = append(n.view.Chains, enforce.Chain{Policy: p, Choice: c, Recorded: true, Desired: rules(), Observed: rules()})
}

// in returns the first chain in a backend.
func (n *node) in(c netfilter.Choice) *enforce.Chain {
	for i := range n.view.Chains {
		if n.view.Chains[i].Choice == c {
			return &n.view.Chains[i]
		}
	}
	return nil
}

// tamper changes what was read of a chain, and compares.
func (n *node) tamper(f policy.Family, chain string, change func(*policy.Chain)) {
	g := n.view.Find(chain)
	change(g.Observed.Find(f, chain))
	g.Diff = policy.Compare(g.Desired, g.Observed)
}

// inKernel adds to what was read in a form.
func (n *node) inKernel(c netfilter.Choice, chains []policy.Chain, unrecognized ...policy.UnrecognizedObject) {
	g := n.in(c)
	g.Observed.Chains = append(g.Observed.Chains, chains...)
	g.Observed.Unrecognized = append(g.Observed.Unrecognized, unrecognized...)
	g.Diff = policy.Compare(g.Desired, g.Observed)
}

func (n *node) explain(q diagnose.Question) diagnose.Explanation {
	return diagnose.Explain(q, n.view, n.sources, n.finder)
}

// question is about traffic to an address; src and out may be "".
func question(dst, src, out string) (q diagnose.Question) {
	q.Dst, q.Out = netip.MustParseAddr(dst), out
	if src != "" {
		q.Src = netip.MustParseAddr(src)
	}
	return q
}

func (n *node) to(dst string) diagnose.Explanation {
	return n.explain(question(dst, "", ""))
}

func network(name, chain string, edit ...func(*policy.SourcePolicy)) policy.Source {
	s := policy.SourcePolicy{Chain: chain, NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "192.168.0.0/16")}
	for _, e := range edit {
		e(&s)
	}
	return policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: name}, Policy: s, Order: 1}
}

func agentFiles(chain string, files ...policy.FilePolicy) policy.Source {
	s := policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: policy.SourcePolicy{Chain: chain}, Files: files}
	for i := range s.Files {
		s.Files[i].Policy.Chain = chain
	}
	return s
}

func file(path string, edit ...func(*policy.SourcePolicy)) policy.FilePolicy {
	f := policy.FilePolicy{File: path}
	for _, e := range edit {
		e(&f.Policy)
	}
	return f
}

var cidrs = policytest.Prefixes

func inNFT(s *policy.SourcePolicy) { s.Backend = policy.NFTables }

func enableIPv6(s *policy.SourcePolicy) { s.EnableIPv6 = new(true) }

func exempting(list ...string) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = cidrs(list...) }
}

func masquerading(list ...string) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) { s.MasqueradeCIDRs = cidrs(list...) }
}

func fromOnly(list ...string) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) { s.SourceCIDRs = cidrs(list...) }
}

// confDir writes conflists and reads them as they are read on a node. Their
// directory is named /etc/cni/net.d in what comes out.
func confDir(t *testing.T, files map[string]string) config.ConfDir {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		assert.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	c := assert.Must(config.ReadConfDir(dir))(t)
	assert.NoError(t, c.Err())
	for i := range c.Conflists {
		c.Conflists[i].File = "/etc/cni/net.d/" + filepath.Base(c.Conflists[i].File)
	}
	return c
}

func conflist(network, keys string) string {
	return `{"cniVersion": "1.0.0", "name": "` + network + `", "plugins": [{"type": "bridge"}, {"type": "ip-masq"` + keys + `}]}`
}

// since is when the documents of these tests were written.
func since(policy.SourceID) (time.Time, error) {
	return time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), nil
}
