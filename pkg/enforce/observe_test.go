// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// addChain adds a chain of this dataDir that masquerades all.
func (f *fixture) addChain(name string, family policy.Family) {
	f.kernel.Chains[netfiltertest.NFTables][policy.ChainFamily{Chain: name, Family: family}] = policy.Chain{
		Family: family, Name: name, Owner: policy.OwnedBy(f.enforcer.Dir.Path()), Rules: []policy.Rule{{Verdict: policy.Masquerade}},
	}
	f.kernel.Changed()
}

// dryRun syncs without writing.
func (f *fixture) dryRun(sources ...policy.Source) *enforce.State {
	f.Helper()
	s := f.enforcer.CheckSync(f.Context(), f.observe(sources...))
	if s.Guard.Err == nil && (s.Differs() || len(s.OtherDataDirs) > 0) {
		f.Errorf("a dry run leaves %v, stale %v, duplicates %v", s.Diff(), s.Stale, s.Duplicates)
	}
	return s
}

// A chain in the owned tables that is neither desired nor on record concerns the chains that are there, and is removed with
// the next write, before a guard binds what it masquerades.
func TestChainInOwnTables(t *testing.T) {
	a, b := network("one", "A", backend(policy.IPTables)), network("two", "B", backend(policy.NFTables))
	for _, name := range []string{"A", "X"} {
		f := newFixture(t)
		f.addChain("X", policy.IPv4)
		if s := f.observe(a, b); len(s.Drift()) > 0 || len(s.Diff()) == 0 {
			t.Errorf("before the first rules: drift %v, diff %v", s.Drift(), s.Diff())
		}
		f.mustApply(a, b)
		f.addChain(name, policy.IPv4)
		var drift *enforce.DriftError
		if s := f.observe(a, b); s.InSync() || len(s.Drift()) == 0 || !errors.As(s.Err("B"), &drift) {
			t.Errorf("%s: in sync %t, drift %v, error %v", name, s.InSync(), s.Drift(), s.Err("B"))
		}
		f.kernel.fail = map[string]error{"write nftables": errRefused}
		if s := f.sync(a, b); !errors.Is(s.Err("B"), errRefused) || s.Err("A") != nil {
			t.Errorf("%s: errors %v and %v", name, s.Err("A"), s.Err("B"))
		}
		f.kernel.log, f.kernel.fail = nil, nil
		f.mustApply(a, network("two", "B", backend(policy.NFTables), guard(policy.GuardOff), enforceExempt))
		if len(f.kernel.Chains[netfiltertest.NFTables]) != 1 || name == "X" && f.kernel.log[0] != "rules of nftables" { // A is a duplicate, and gone
			t.Errorf("%s: writes %q, and the kernel has\n%s", name, f.kernel.log, f.kernel.dump())
		}
	}
}

// A chain that is new is written in all of its families or in none. A repair does what it can. A dry run asks for the families
// that differ.
func TestFamilyThatCannotBeWritten(t *testing.T) {
	f := newFixture(t)
	both, four := network("one", "A", backend(policy.IPTables), enableIPv6), network("one", "A", backend(policy.IPTables))
	inIPv6 := func(in string) map[string]error { return map[string]error{mayWrite + in + " ipv6": errRefused} }
	f.kernel.fail = inIPv6(inIPTables)
	f.sync(both)
	f.writes()
	f.mustApply(four)
	f.kernel.log = nil
	f.sync(both)
	f.writes()
	f.kernel.fail = nil
	f.mustApply(both)
	lose := func(families ...policy.Family) {
		f.kernel.fail = inIPv6(inIPTables)
		f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
			if slices.Contains(families, c.Family) {
				c.Jumps = nil
			}
		})
	}
	lose(policy.IPv4)
	assert.NoError(t, f.dryRun(both).Err("A"))
	lose(policy.IPv6)
	if err := f.dryRun(both).Err("A"); !errors.Is(err, errRefused) {
		t.Errorf("error %v", err)
	}
	f.mustBeInSync(f.sync(both)) // in this kernel only the question is refused

	b := network("two", "B", backend(policy.NFTables))
	f.mustApply(both, b)
	f.addChain("X", policy.IPv6)
	f.kernel.fail = inIPv6(inNFTables)
	if s := f.dryRun(both, b); !errors.Is(s.Err("B"), errRefused) || s.Err("A") != nil {
		t.Errorf("errors %v and %v", s.Err("A"), s.Err("B"))
	}
	f.dryRun(network("two", "B", backend(policy.NFTables), guard(policy.GuardDrop))) // A is stale, and stays
}

// A chain of the owned tables that belongs to another dataDir fails those beside it, and is no difference. One without a comment
// is repaired, as is one on record, and what cannot be decoded is a difference.
func TestChainOfAnotherDataDir(t *testing.T) {
	f := newFixture(t)
	a, b := network("one", "A", backend(policy.IPTables)), network("two", "B", backend(policy.NFTables))
	f.mustApply(a, b)
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
		c.Owner, c.Rules = policy.Owner{}, append(c.Rules, policy.Rule{Verdict: policy.Unrecognized})
	})
	if s := f.observe(a, b); len(s.Drift()) == 0 {
		t.Error("a rule that cannot be decoded is no drift")
	}
	f.mustBeInSync(f.sync(a, b))
	f.addChain("X", policy.IPv4)
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
		if c.Name == "X" {
			c.Owner = policy.OwnedBy("/other")
		}
	})
	if s := f.observe(a, b); !errors.Is(s.Err("B"), enforce.ErrOtherDataDir) || s.Err("A") != nil || len(s.Diff()) > 0 {
		t.Errorf("errors %v and %v, differences %v", s.Err("A"), s.Err("B"), s.Diff())
	}
	f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{}
	delete(f.kernel.Chains[netfiltertest.NFTables], policy.ChainFamily{Chain: "B", Family: policy.IPv4})
	if s := f.sync(a); s.Err("A") != nil {
		t.Errorf("a repair: %v", s.Err("A"))
	}
	f.kernel.Chains[netfiltertest.IPTables], f.kernel.log = map[policy.ChainFamily]policy.Chain{}, nil
	f.putRecord(func(r *store.Record) { r.Chains = nil })
	if s := f.sync(a); !errors.Is(s.Err("A"), enforce.ErrOtherDataDir) || len(f.kernel.log) > 0 {
		t.Errorf("the first write: %v, %q", s.Err("A"), f.kernel.log)
	}
	f = newFixture(t)
	f.kernel.Chains[netfiltertest.NFTables][policy.ChainFamily{Chain: "B", Family: policy.IPv4}] = policy.Chain{Family: policy.IPv4, Name: "B", Rules: []policy.Rule{{Verdict: policy.Unrecognized}}}
	f.mustApply(b)
}

// What cannot be read is neither right nor different.
func TestUnreadableRules(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", guard(policy.GuardDrop))
	if drift := f.observe(net).Drift(); len(drift) > 0 {
		t.Errorf("drift before the first rules: %v", drift)
	}
	f.mustApply(net)
	f.kernel.fail = map[string]error{"observe " + inIPTables: errRefused}
	if s := f.observe(net); s.InSync() || !errors.Is(s.Err("A"), errRefused) || s.Exists("A") || s.Differs() {
		t.Errorf("in sync %t, error %v, differs %t", s.InSync(), s.Err("A"), s.Differs())
	}
	before := f.record()
	lock, release := f.lock()
	_, err := f.enforcer.Apply(t.Context(), lock, store.State{Sources: []policy.Source{net}, Record: before}, &enforce.Proposal{Sources: []policy.Source{net}})
	if release(); err != nil || !reflect.DeepEqual(f.record().Resets, before.Resets) {
		t.Errorf("%v, resets %+v", err, f.record().Resets)
	}
	f.kernel.fail = nil
	f.kernel.Guards = append(f.kernel.Guards, policy.Guard{Chain: "X", Family: policy.IPv4, Owner: f.kernel.Guards[0].Owner})
	if len(f.observe(net).Drift()) == 0 {
		t.Error("a guard of no policy is no drift")
	}
}

// A chain exists if packets can reach it. Packets of a family that is out of scope need not.
func TestExists(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", enableIPv6, func(s *policy.SourcePolicy) { s.SourceCIDRs = prefixes("10.88.0.0/16") })
	if f.observe(net).Exists("A") {
		t.Error("before it is written")
	}
	f.mustApply(net)
	if !f.observe(net).Exists("A") {
		t.Error("it does not")
	}
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) { c.Jumps = nil })
	if f.observe(net).Exists("A") {
		t.Error("without a jump")
	}
}

// A chain that cannot be removed is a warning, and fails nothing: neither an ADD, nor a guard that binds nothing of it. Only
// the reconciler tries again.
func TestChainThatCannotBeRemoved(t *testing.T) {
	f := newFixture(t)
	a := network("one", "A", guard(policy.GuardDrop), enforceExempt, exempts("10.0.0.0/8", "192.0.2.0/24"))
	f.mustApply(a, network("two", "B"))
	f.kernel.fail = map[string]error{"remove ": errRefused}
	f.mustBeInSync(f.sync(a))
	if len(f.warnings) != 1 {
		t.Errorf("warnings %q", f.warnings)
	}
	f.kernel.effects = nil
	f.mustBeInSync(f.observe(a))
	f.mustApply(a)
	f.mustApply(network("one", "A", guard(policy.GuardDrop), enforceExempt, exempts("10.0.0.0/8")))
	stuck := slices.ContainsFunc(f.record().Chains, func(o store.OwnedChain) bool { return o.Chain == "B" && o.RemovalFailed })
	if f.kernel.count("remove ") > 0 || !stuck {
		t.Errorf("removed %d times, the record has %+v", f.kernel.count("remove "), f.record().Chains)
	}
}

// An address is taken from its former pod, and the record has the new one, only when all rules that exempt it are there.
func TestAddressOfAFailedRun(t *testing.T) {
	source := network("podnet", "A", guard(policy.GuardDrop), func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} })
	address := netip.MustParseAddr("10.88.0.5")
	attachment := func(container string) store.Attachment {
		return store.Attachment{Network: "podnet", ContainerID: container, IfName: "eth0"}
	}
	for effect, others := range map[string]bool{writeRules: false, "write guards": false, "write ": true, "no such effect": false} {
		f := newFixture(t)
		f.enforcer.RereadAll = true
		attach := func(container, namespace string) {
			must(t, f.enforcer.Dir.Attach(store.Pod{Attachment: attachment(container), Namespace: namespace, Addresses: []netip.Addr{address}}))
		}
		sources := []policy.Source{network("podnet", "A", guard(policy.GuardDrop))}
		if !others {
			sources = []policy.Source{source}
		}
		attach("former", "dev")
		f.mustApply(sources...)
		before := f.record()
		attach("new", "prod")
		f.kernel.fail = map[string]error{effect: errRefused}
		f.sync(source)
		fails := effect != "no such effect"
		former := assert.Must(f.enforcer.Dir.Pod(attachment("former")))(t)
		if rec := f.record(); len(former.Addresses) > 0 != fails || slices.Equal(rec.Pods, before.Pods) != fails || slices.Equal(rec.Namespaces, before.Namespaces) != (fails || !others) {
			t.Errorf("%q fails: the former pod has %v, on record are %v of %v", effect, former.Addresses, rec.Pods, rec.Namespaces)
		}
		f.kernel.fail = nil
		f.mustBeInSync(f.sync(source))
	}
}

// Beside a document that cannot be read the chains of the owned tables stay that no other document is about, in all families.
func TestUnreadableDocumentAndOwnTables(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("own", "A", backend(policy.NFTables), enableIPv6), network("other", "B", backend(policy.NFTables)))
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
		c.Rules = append(c.Rules, policy.Rule{Verdict: policy.Unrecognized})
	})
	p := &enforce.Proposal{Sources: []policy.Source{network("own", "A", backend(policy.NFTables))}, Lost: []store.FileError{{}}}
	lock, release := f.lock()
	defer release()
	f.kernel.log, f.kernel.Chains[netfiltertest.Legacy][policy.ChainFamily{Chain: "A", Family: policy.IPv4}] = nil, policy.Chain{Family: policy.IPv4, Name: "A"}
	for _, writes := range []int{0, 1, 1} {
		s, err := f.enforcer.Apply(t.Context(), lock, store.State{Sources: p.Sources, Record: f.record()}, p)
		if must(t, err); s.Err("A") != nil || len(f.kernel.Chains[netfiltertest.NFTables]) != 3 || len(f.kernel.log) != writes || len(f.kernel.Chains[netfiltertest.Legacy]) == 0 {
			t.Errorf("error %v, writes %q, and the kernel has\n%s", s.Err("A"), f.kernel.log, f.kernel.dump())
		}
		if writes == 0 {
			f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) { c.Jumps = nil })
		}
	}
}

// TestRepairBesideAChainThatFailed: a chain that fails before its first write, as the addresses of the node cannot be read, keeps
// no other chain from being repaired, in the tables of nftables neither, nor by the right to write its own families.
func TestRepairBesideAChainThatFailed(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		f := newFixture(t)
		a := network("one", "A", backend(b))
		f.mustApply(a)
		choice := f.record().Chains[0]
		fails := network("two", "B", backend(b), func(s *policy.SourcePolicy) {
			s.EnableIPv6 = new(true)
			s.OutputAddresses = prefixes("203.0.113.0/24")
		})
		f.enforcer.Addresses = func([]policy.Family) ([]policy.NodeAddress, error) { return nil, errRefused }
		f.kernel.Chains[enforce.ChoiceOf(choice)] = map[policy.ChainFamily]policy.Chain{}
		f.kernel.Changed()
		f.kernel.fail = map[string]error{mayWrite: errRefused}
		s := f.sync(a, fails)
		if s.Err("A") != nil || !errors.Is(s.Err("B"), errRefused) || len(f.kernel.Chains[enforce.ChoiceOf(choice)]) != 1 {
			t.Errorf("%s: %v, %v, rules:\n%s", b, s.Err("A"), s.Err("B"), f.kernel.dump())
		}
	}
}

// TestNoRepairBesideARefusedChainOfTheTable: a write to a table of nftables would remove a chain that is there and must not be
// changed. The error of the others names it.
func TestNoRepairBesideARefusedChainOfTheTable(t *testing.T) {
	f := newFixture(t)
	a, b := network("one", "A", backend(policy.NFTables)), network("two", "B", backend(policy.NFTables), func(s *policy.SourcePolicy) {
		s.OutputAddresses = prefixes("203.0.113.0/24")
	})
	f.enforcer.Addresses = func([]policy.Family) ([]policy.NodeAddress, error) { return nil, nil }
	f.mustApply(a, b)
	f.enforcer.Addresses = func([]policy.Family) ([]policy.NodeAddress, error) { return nil, errRefused }
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
		if c.Name == "A" {
			c.Jumps = nil
		}
	})
	before := f.kernel.dump()
	s := f.sync(a, b)
	if err := s.Err("A"); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "chain B, which is in the same table") || f.kernel.dump() != before {
		t.Errorf("%v, rules:\n%s", err, f.kernel.dump())
	}
}

// TestResetsOfARename: a chain that is renamed while pods are listed again, as its namespaces change, is none that another
// program removed, although it is on record and not in the kernel by then.
func TestResetsOfARename(t *testing.T) {
	resets := func(s *policy.SourcePolicy) {
		s.StaleConnections, s.PodCIDRs = policy.ResetConnections, prefixes("10.88.0.0/16")
	}
	lists := func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} }
	f := newFixture(t)
	f.mustApply(network("one", "A", resets))
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	f.mustApply(network("one", "A2", resets, lists))
	if due := f.record().Resets; len(due) != 1 || due[0].Before == nil {
		t.Errorf("resets are %+v", due)
	}
}
