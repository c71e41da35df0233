// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// These are orders of writes in which packets were once dropped or bound although a policy exempts or masquerades them.

func enforceExempt(s *policy.SourcePolicy) { s.EnforceExempt = new(true) }

// Tables that are in the kernel are not unusable.
func TestUnusableGuardThatDrops(t *testing.T) {
	f := newFixture(t)
	drop := guard(policy.GuardDrop)
	f.mustApply(network("podnet", "A", drop, exempts("10.0.0.0/8")))
	f.kernel.log = nil
	f.kernel.fail = map[string]error{"write guards": fmt.Errorf("no memory: %w", netfilter.ErrUnusable)}
	if _, err := f.apply(network("podnet", "A", drop, exempts("10.0.0.0/8", "192.0.2.0/24"))); err == nil {
		t.Error("no error")
	}
	f.writes()
}

// A chain is not removed under a guard that cannot be, or of which it is not known whether it is there. One that only counts keeps
// none.
func TestDroppedNetworkUnderAGuard(t *testing.T) {
	for name, c := range map[string]struct {
		guard         []func(*policy.SourcePolicy)
		fails         string
		removed, left []string
	}{
		"drops":      {[]func(*policy.SourcePolicy){guard(policy.GuardDrop)}, "write guards", nil, []string{"guards:", "remove A"}},
		"binds":      {[]func(*policy.SourcePolicy){guard(policy.GuardOff), enforceExempt}, "write guards", nil, []string{"guards:", "remove A"}},
		"unreadable": {[]func(*policy.SourcePolicy){guard(policy.GuardDrop)}, readGuards, nil, []string{"guards:", "remove A"}},
		"counts":     {[]func(*policy.SourcePolicy){guard(policy.GuardCount)}, "write guards", []string{"remove A"}, []string{"guards:"}},
	} {
		f := newFixture(t)
		f.mustApply(network("podnet", "A", append(c.guard, exempts("10.0.0.0/8"))...), network("other", "B"))
		f.kernel.log, f.kernel.fail = nil, map[string]error{c.fails: errRefused}
		f.sync(network("other", "B"))
		removed := f.kernel.log
		f.kernel.log, f.kernel.fail = nil, nil
		f.mustBeInSync(f.sync(network("other", "B")))
		if !slices.Equal(removed, c.removed) || !slices.Equal(f.kernel.log, c.left) {
			t.Errorf("%s: %q, then %q", name, removed, f.kernel.log)
		}
	}
}

// A pod is not made exempt, nor does it cease to be, under a guard that cannot be read: it may drop what the rules exempt
// then. Rules that are missing are repaired all the same.
func TestExemptionUnderAnUnreadableGuard(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", guard(policy.GuardDrop), func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} })
	f.mustApply(net)
	pod := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod", IfName: "eth0"}, Namespace: "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.5")}}
	must(t, f.enforcer.Dir.Attach(pod))
	f.enforcer.Reread = []store.Attachment{pod.Attachment}
	f.kernel.log, f.kernel.fail = nil, map[string]error{readGuards: errRefused}
	f.sync(net)
	f.writes()
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(net))
	f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{}
	f.kernel.log, f.kernel.fail = nil, map[string]error{readGuards: errRefused}
	f.sync(net)
	f.writes(rulesInNFT)
	for _, changed := range []policy.Source{
		network("podnet", "A", guard(policy.GuardDrop), exempts("192.0.2.0/24")),
		network("podnet", "A", exempts("192.0.2.0/24")),
	} {
		if _, err := f.apply(changed); err == nil {
			t.Errorf("a policy with guard %q changes under a guard that cannot be read", changed.Policy.Guard)
		}
		f.writes()
	}
}

// The guard of a network that is dropped is not that of another chain, whose former rules may exempt more.
func TestFirstGuardBesideADroppedNetwork(t *testing.T) {
	for _, to := range []policy.Backend{policy.IPTables, policy.NFTables} {
		f := newFixture(t)
		f.mustApply(network("one", "A", backend(policy.IPTables), exempts("10.0.0.0/8", "192.0.2.0/24")), network("two", "B", guard(policy.GuardDrop), exempts("10.0.0.0/8")))
		f.kernel.log = nil
		f.mustApply(network("one", "A", backend(to), guard(policy.GuardDrop), exempts("10.0.0.0/8")))
		first := slices.IndexFunc(f.kernel.log, func(w string) bool { return strings.HasPrefix(w, "guards: A") })
		if rules := slices.IndexFunc(f.kernel.log, func(w string) bool { return strings.HasPrefix(w, "rules") }); rules < 0 || first < rules {
			t.Errorf("writes %q", f.kernel.log)
		}
	}
}

// Nor is a chain of a family that its policy no longer manages.
func TestFamilyUnderAGuard(t *testing.T) {
	f := newFixture(t)
	both := func(s *policy.SourcePolicy) {
		s.EnableIPv6, s.PodCIDRs = new(true), append(s.PodCIDRs, prefixes("fd00:88::/64")...)
	}
	drop := guard(policy.GuardDrop)
	f.mustApply(network("podnet", "A", backend(policy.IPTables), drop, both, exempts("10.0.0.0/8")))
	f.kernel.log, f.kernel.fail = nil, map[string]error{"write guards": errRefused}
	f.sync(network("podnet", "A", backend(policy.IPTables), drop, exempts("10.0.0.0/8")))
	f.writes()
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(network("podnet", "A", backend(policy.IPTables), drop, exempts("10.0.0.0/8"))))
	f.writes(guardA, "remove A")
}

// A chain that could not move to another backend stays where it is, whatever else is written there.
func TestMoveThatFails(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("one", "A", backend(policy.NFTables)), network("two", "B", backend(policy.NFTables)))
	f.kernel.fail = map[string]error{writeRules: errRefused}
	_, _ = f.apply(network("one", "A", backend(policy.IPTables)), network("two", "B", backend(policy.NFTables), exempts("192.0.2.0/24")))
	for choice, chains := range f.kernel.Chains {
		if _, exists := chains[policy.ChainFamily{Family: policy.IPv4, Chain: "A"}]; choice.Backend == policy.NFTables && !exists {
			t.Error("chain A is in no backend")
		}
	}
	f.kernel.fail = nil
	f.mustApply(network("one", "A", backend(policy.IPTables)), network("two", "B", backend(policy.NFTables), exempts("192.0.2.0/24")))
}

// A chain stays that has another name now and could not be written there, also when only the record tells of it.
func TestRenameThatFails(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("podnet", "A", backend(policy.NFTables)), network("other", "C", backend(policy.NFTables)))
	f.kernel.log, f.kernel.fail = nil, map[string]error{writeRules: errRefused}
	renamed := []policy.Source{network("podnet", "B", backend(policy.IPTables)), network("other", "C", backend(policy.NFTables))}
	_, _ = f.apply(renamed...)
	f.sync(renamed...)
	f.writes()
	f.putRecord(func(r *store.Record) { // as a process that was killed
		r.Chains = append(r.Chains, store.OwnedChain{Chain: "B", Family: policy.IPv4, Backend: policy.IPTables, Variant: netfiltertest.IPTables.Variant})
	})
	f.sync(renamed...)
	f.writes()
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(renamed...))
	f.writes("rules of iptables (nft)", "remove ")
}

// A chain that fails does not keep the former chain of another network.
func TestRenameBesideAChainThatFails(t *testing.T) {
	f := newFixture(t)
	other := network("other", "C", backend(policy.NFTables))
	f.mustApply(network("podnet", "A", backend(policy.IPTables)), other)
	f.kernel.log, f.kernel.fail = nil, map[string]error{"observe " + inNFTables: errRefused}
	f.sync(network("podnet", "B", backend(policy.IPTables)), other)
	f.writes("rules of iptables (nft)", "remove A")
}

// A chain whose new rules another program reverts stays where it is, and in the families that it was in.
func TestMoveThatIsReverted(t *testing.T) {
	both := network("one", "A", backend(policy.IPTables), enableIPv6)
	for name, to := range map[string]policy.Source{
		inNFTables: network("one", "A", backend(policy.NFTables), enableIPv6),
		inIPTables: network("one", "A", backend(policy.IPTables), exempts("192.0.2.0/24")),
	} {
		f := newFixture(t)
		f.mustApply(both)
		f.kernel.undone = map[string]int{"write " + name: 9}
		if err := f.sync(to).Err("A"); err == nil || len(f.kernel.Chains[netfiltertest.IPTables]) != 2 {
			t.Errorf("to %s: error %v, left is\n%s", name, err, f.kernel.dump())
		}
		f.kernel.undone = nil
		f.mustApply(to)
	}
}

// What a chain whose rules could not be written masquerades is bound by no guard.
func TestGuardBesideRulesThatCannotBeWritten(t *testing.T) {
	f := newFixture(t)
	one := func(exempt ...string) policy.Source {
		return network("one", "A", backend(policy.IPTables), exempts(exempt...))
	}
	two := func(exempt ...string) policy.Source {
		return network("two", "B", backend(policy.NFTables), guard(policy.GuardOff), enforceExempt, exempts(exempt...))
	}
	f.mustApply(one("10.0.0.0/8"), two("10.0.0.0/8"))
	f.kernel.fail = map[string]error{writeRules: errRefused}
	_, _ = f.apply(two("10.0.0.0/8", "192.0.2.0/24"), one("10.0.0.0/8", "192.0.2.0/24"))
	masqueraded := policy.RangesOf(prefixes("192.0.2.0/24")...)
	for _, g := range f.kernel.Guards {
		if g.Bound.Overlaps(masqueraded) {
			t.Errorf("the guard of %s binds %s", g.Chain, g.Bound)
		}
	}
	f.kernel.fail = nil
	f.mustApply(two("10.0.0.0/8", "192.0.2.0/24"), one("10.0.0.0/8", "192.0.2.0/24"))
}

// A chain that cannot be read may have rules that exempt more than those of its policy's former name: no guard takes the place of
// the former one before.
func TestRenameToAnUnreadableChain(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("one", "A", guard(policy.GuardDrop), exempts("10.0.0.0/8")))
	f.kernel.fail = map[string]error{"observe " + inNFTables: errRefused}
	to := network("one", "B", backend(policy.NFTables), guard(policy.GuardDrop), exempts("10.0.0.0/8"))
	f.sync(to)
	for _, g := range f.kernel.Guards {
		if g.Chain == "B" {
			t.Errorf("chain B has a guard and cannot be read: %+v", g)
		}
	}
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(to))
}

// A rule that cannot be decoded, in a chain that no policy wants any more, does not refuse a policy.
func TestUndecodableRuleInAStaleChain(t *testing.T) {
	f := newFixture(t)
	a, b := network("one", "A", backend(policy.NFTables), enableIPv6), network("two", "B", backend(policy.NFTables))
	for _, stale := range []policy.Source{network("one", "A", backend(policy.NFTables)), network("one", "C", backend(policy.IPTables))} {
		f.mustApply(a, b)
		f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
			if c.Name == "A" && c.Family == policy.IPv6 {
				c.Rules = append(c.Rules, policy.Rule{Verdict: policy.Unrecognized})
			}
		})
		f.mustApply(stale, network("two", "B", backend(policy.NFTables), exempts("192.0.2.0/24")))
	}
}

// A chain that gets its former name again, where the chain of that name could not be removed, stays until the new rules are there.
func TestRenameBackToAStuckChain(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("one", "A", exempts("10.0.0.0/8")))
	f.kernel.fail = map[string]error{"remove ": errRefused}
	_, _ = f.apply(network("one", "B", exempts("192.0.2.0/24")))
	f.kernel.log, f.kernel.fail = nil, map[string]error{writeRules: errRefused}
	back := network("one", "A", exempts("198.51.100.0/24"))
	_, _ = f.apply(back)
	f.writes()
	f.enforcer.AllBackends, f.kernel.fail = true, map[string]error{writeRules: errRefused}
	f.sync(back)
	f.writes()
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(back))
	f.writes(rulesInNFT, "remove B")
}

// A process that is killed may have recorded an exempt pod that neither rules nor guards have: the rules do not exempt it either
// while the guards cannot be read.
func TestRecordedExemptionUnderAnUnreadableGuard(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", guard(policy.GuardDrop), func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} })
	f.mustApply(net)
	pod := policy.ExemptPod{Address: netip.MustParseAddr("10.88.0.5"), Namespace: "prod"}
	f.putRecord(func(r *store.Record) { r.Pods = []store.ExemptPod{{ExemptPod: pod}} })
	f.kernel.log, f.kernel.fail = nil, map[string]error{readGuards: errRefused}
	f.sync(net)
	f.writes()
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(net))
}

// Beside a document that cannot be read the guard of a chain that gets a missing jump is about the interfaces of that jump.
func TestGuardOfAMissingJump(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("own", "A", guard(policy.GuardDrop)), network("other", "B"))
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) { c.Jumps = nil })
	own := network("own", "A", guard(policy.GuardDrop), func(s *policy.SourcePolicy) { s.OutputInterfaces = []string{"eth0"} })
	lock, release := f.lock()
	defer release()
	p := &enforce.Proposal{Sources: []policy.Source{own}, Lost: []store.FileError{{}}}
	_, err := f.enforcer.Apply(t.Context(), lock, store.State{Sources: p.Sources, Record: f.record()}, p)
	must(t, err)
	if g := f.kernel.Guards[0]; !slices.Equal(g.Scope.Interfaces, own.Policy.OutputInterfaces) {
		t.Errorf("the guard is about %q", g.Scope.Interfaces)
	}
}

// Beside a document that cannot be read the guard of a chain that cannot be read stays, and a new one is not added.
func TestUnreadableChainBesideAnUnreadableDocument(t *testing.T) {
	f := newFixture(t)
	drops := network("own", "A", backend(policy.NFTables), guard(policy.GuardDrop), exempts("10.0.0.0/8"))
	counts := network("own", "A", backend(policy.NFTables), guard(policy.GuardCount), exempts("10.0.0.0/8"))
	f.mustApply(drops, network("other", "B", backend(policy.IPTables)))
	f.kernel.log, f.kernel.fail = nil, map[string]error{"observe " + inNFTables: errRefused}
	unreadable := func(own policy.Source) {
		t.Helper()
		lock, release := f.lock()
		defer release()
		p := &enforce.Proposal{Sources: []policy.Source{network("third", "C", backend(policy.IPTables)), own}, Lost: []store.FileError{{}}}
		s, err := f.enforcer.Apply(t.Context(), lock, store.State{Sources: p.Sources, Record: f.record()}, p)
		if must(t, err); s.Err("A") == nil {
			t.Error("chain A was read")
		}
	}
	unreadable(counts)
	f.writes(rulesInNFT)
	f.kernel.Guards = nil
	unreadable(drops)
	f.writes()
}

// After the documents were lost, the connections that another policy contradicts end as those that met no rule.
func TestResetAfterLostDocuments(t *testing.T) {
	f := newFixture(t)
	resets := func(s *policy.SourcePolicy) {
		s.StaleConnections, s.PodCIDRs = policy.ResetConnections, prefixes("10.88.0.0/16")
	}
	f.mustApply(network("one", "A", resets))
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	must(t, os.RemoveAll(f.enforcer.Dir.Path()+"/sources"))
	f.mustApply(network("two", "B", resets))
	if got := f.record().Resets; len(got) != 1 || !got[0].FindsUntranslated() {
		t.Errorf("resets %+v", got)
	}
}

// The walk after a change of a policy knows which pods were exempt before.
func TestResetKnowsTheExemptPods(t *testing.T) {
	f := newFixture(t)
	net := func(exempt string) policy.Source {
		return network("podnet", "A", guard(policy.GuardDrop), exempts(exempt), func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} })
	}
	pod := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod", IfName: "eth0"}, Namespace: "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.5")}}
	must(t, f.enforcer.Dir.Attach(pod))
	f.enforcer.Reread = []store.Attachment{pod.Attachment}
	f.mustApply(net("10.0.0.0/8"))
	f.mustApply(net("192.0.2.0/24"))
	resets := f.record().Resets
	if last := resets[len(resets)-1]; len(last.Before) != 1 || len(last.Pods) != 1 || last.Pods[0].Address != pod.Addresses[0] {
		t.Errorf("resets %+v", resets)
	}
}
