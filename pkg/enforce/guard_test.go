// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func guard(mode policy.GuardMode) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) {
		s.Guard, s.PodCIDRs = mode, prefixes("10.88.0.0/16")
	}
}

var prefixes = policytest.Prefixes

func exempts(list ...string) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) {
		s.NonMasqueradeCIDRs = prefixes(list...)
		s.MasqLinkLocal = new(true)
	}
}

// apply applies the sources, as an ADD of the first one does, and fails if that fails.
func (f *fixture) apply(sources ...policy.Source) (*enforce.State, error) {
	f.Helper()
	lock, release := f.lock()
	defer release()
	state, err := f.enforcer.Dir.Load()
	must(f, err)
	p := &enforce.Proposal{Sources: sources, Changed: sources}
	s, err := f.enforcer.Apply(context.Background(), lock, state, p)
	if err == nil {
		err = s.Err(sources[0].Policy.Chain)
	}
	return s, err
}

func (f *fixture) mustApply(sources ...policy.Source) {
	f.Helper()
	s := assert.Must(f.apply(sources...))(f)
	f.mustBeInSync(s)
}

// writes fails the test unless these were the writes since the last call.
func (f *fixture) writes(want ...string) {
	f.Helper()
	assert.Equal(f, "writes", f.kernel.log, want)
	f.kernel.log = nil
}

const (
	rulesInNFT = "rules of " + inIPTables
	guardA     = "guards: A drop pods 10.88.0.0/16 exempt 10.0.0.0/8"
)

// A chain that gets another name has a guard at any time, which is right for the rules of both names.
func TestGuardOfARenamedChain(t *testing.T) {
	f := newFixture(t)
	f.mustApply(network("one", "A", guard(policy.GuardDrop), exempts("10.0.0.0/8")))
	f.writes(guardA, rulesInNFT)
	renamed := network("one", "B", guard(policy.GuardDrop), exempts("192.168.0.0/16"))
	f.mustApply(renamed)
	const guardB = " B drop pods 10.88.0.0/16 exempt 192.168.0.0/16"
	f.writes("guards: B drop pods 10.88.0.0/16 exempt {10.0.0.0/8, 192.168.0.0/16}", rulesInNFT, "guards:"+guardB, "remove A")
	f.kernel.effects = nil
	f.mustApply(network("two", "C", guard(policy.GuardDrop), exempts("10.0.0.0/8")), renamed) // which had no other name
	f.writes(rulesInNFT, "guards:"+guardB+" C drop pods 10.88.0.0/16 exempt 10.0.0.0/8")
	if n := f.kernel.count("observe " + inIPTables); n != 2 { // what is right is read once
		t.Errorf("the rules are read %d times: %q", n, f.kernel.effects)
	}
	six := func(chain string) policy.Source {
		return network("six", chain, enableIPv6, func(s *policy.SourcePolicy) {
			s.Guard, s.PodCIDRs = policy.GuardDrop, prefixes("10.89.0.0/16", "fd00:88::/64")
		})
	}
	f.mustApply(six("D"), renamed)
	f.kernel.log = nil
	f.mustApply(six("E"), renamed)
	if first := f.kernel.log[0]; strings.Count(first, "E drop") != 2 {
		t.Errorf("writes %q", f.kernel.log)
	}
}

// An address passes to another pod, and the sync that finds it also changes the list of namespaces: the connections of the
// former pod end all the same, unless both pods are of one namespace.
func TestAddressPassesWhileNamespacesChange(t *testing.T) {
	for namespace, passes := range map[string]bool{"": true, "kube": false, "team": true} {
		f := newFixture(t)
		lists := func(namespaces ...string) policy.Source {
			return network("podnet", "A", func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = namespaces })
		}
		address := netip.MustParseAddr("10.88.0.5")
		attach := func(container, namespace string) {
			t.Helper()
			pod := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: container, IfName: "eth0"}, Namespace: namespace, Addresses: []netip.Addr{address}}
			must(t, f.enforcer.Dir.Attach(pod))
		}
		f.enforcer.RereadExempt = true
		attach("former", "kube")
		f.mustBeInSync(f.sync(lists("kube")))
		attach("new", namespace)
		f.mustBeInSync(f.sync(lists("kube", "team")))
		var passed []netip.Addr
		for _, r := range f.record().Resets {
			passed = append(passed, r.Passed...)
		}
		if passes != slices.Equal(passed, []netip.Addr{address}) || !passes && len(passed) > 0 {
			t.Errorf("from namespace kube to %q: the connections of %v are reset", namespace, passed)
		}
		f.putRecord(func(r *store.Record) { r.Resets = nil })
		f.enforcer.Reread = []store.Attachment{{Network: "podnet", ContainerID: "new", IfName: "eth0"}}
		f.mustBeInSync(f.sync(lists("kube", "team", "more")))
		attach("new", "last")
		if f.mustBeInSync(f.sync(lists("kube", "last"))); len(f.record().Resets) != 1 {
			t.Errorf("this ADD's pod: resets %+v", f.record().Resets)
		}
		// Where the records of pods cannot be read, those on record stay exempt, and only the chains fail that exempt some.
		dir := f.enforcer.Dir.Path() + "/attachments"
		must(t, errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)))
		s := f.observe(lists("kube", "last"), network("other", "B"))
		if s.Err("A") == nil || s.Find("B").Err != nil || len(s.Find("A").Policy.ExemptPods) != 1 {
			t.Errorf("unreadable pods: errors %v and %v, exempt are %v", s.Err("A"), s.Find("B").Err, s.Find("A").Policy.ExemptPods)
		}
	}
}

// A repair does what it can: rules that cannot be written keep the guard, and the other way round.
func TestGuardAndRulesFailSeparately(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", guard(policy.GuardDrop), exempts("10.0.0.0/8"))
	f.sync(net)
	f.writes(guardA, rulesInNFT)
	lost := func() {
		f.kernel.Guards, f.kernel.Chains[netfiltertest.IPTables] = nil, map[policy.ChainFamily]policy.Chain{}
	}
	lost()
	f.kernel.fail = map[string]error{writeRules: errRefused}
	if err := f.sync(net).Err("A"); !errors.Is(err, errRefused) {
		t.Errorf("error %v", err)
	}
	f.writes(guardA)
	f.kernel.fail = nil

	counts := network("podnet", "A", guard(policy.GuardCount), exempts("10.0.0.0/8")) // without a reset the record stays
	f.mustBeInSync(f.sync(counts))
	f.kernel.log = nil

	lost()
	f.enforcer.AllBackends = true
	s := f.observe(net)
	f.kernel.fail = map[string]error{readGuards: errRefused, "write guards": errRefused}
	lock, release := f.lock()
	if err := f.enforcer.Sync(t.Context(), s, lock).Err("A"); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "guard of chain A") {
		t.Errorf("error %v", err)
	}
	release()
	f.writes(rulesInNFT)

	lost()
	s = f.sync(net) // the guard cannot even be read
	if err := s.Err("A"); !errors.Is(err, errRefused) || !strings.Contains(err.Error(), "guard of chain A") || s.InSync() {
		t.Errorf("error %v, in sync %t", err, s.InSync())
	}
	f.writes(rulesInNFT)
}

func TestGuardInactive(t *testing.T) {
	unusable := fmt.Errorf("no nf_tables: %w", netfilter.ErrUnusable)
	const noPods = "no address of a pod is known; if pods have addresses of this family, state podCIDRs, inside sourceCIDRs and outside nonMasqueradeSourceCIDRs"
	for name, c := range map[string]struct {
		edit  func(*policy.SourcePolicy)
		spoil func(*kernel)
		want  string
	}{
		"no range": {
			func(s *policy.SourcePolicy) { s.Guard = policy.GuardDrop }, func(*kernel) {},
			"chain A (ipv4): guard without effect: " + noPods,
		},
		"no IPv6 range": {
			func(s *policy.SourcePolicy) {
				guard(policy.GuardDrop)(s)
				s.EnableIPv6, s.EnforceExempt, s.StaleConnections = new(true), new(true), policy.ResetConnections
			}, func(*kernel) {},
			"chain A (ipv6): guard, staleConnections, enforceExempt without effect: " + noPods,
		},
		"no source of IPv6 in scope": {
			func(s *policy.SourcePolicy) {
				guard(policy.GuardDrop)(s)
				s.EnableIPv6, s.SourceCIDRs = new(true), prefixes("10.88.0.0/16")
			}, func(*kernel) {}, "",
		},
		"out of scope": {
			func(s *policy.SourcePolicy) {
				guard(policy.GuardCount)(s)
				s.SourceCIDRs = prefixes("10.99.0.0/16")
			}, func(*kernel) {},
			"chain A (ipv4): guard without effect: " + noPods,
		},
		"no range to reset": {
			func(s *policy.SourcePolicy) { s.StaleConnections = policy.ResetConnections }, func(*kernel) {},
			"chain A (ipv4): staleConnections without effect: " + noPods,
		},
		"no nf_tables": {
			guard(policy.GuardDrop), func(k *kernel) { k.fail = map[string]error{readGuards: unusable} },
			"chain A (ipv4): guard without effect: no nf_tables: backend unusable",
		},
		"no nf_tables for enforceExempt": {
			func(s *policy.SourcePolicy) {
				guard(policy.GuardOff)(s)
				s.EnforceExempt, s.StaleConnections = new(true), policy.ResetConnections
			}, func(k *kernel) { k.fail = map[string]error{readGuards: unusable} },
			"chain A (ipv4): enforceExempt without effect: no nf_tables: backend unusable",
		},
	} {
		f := newFixture(t)
		c.spoil(f.kernel)
		net := network("podnet", "A", c.edit)
		f.mustApply(net)
		s := f.observe(net)
		f.mustBeInSync(s)
		var got []string
		for _, i := range s.Guard.Inactive {
			got = append(got, i.Error())
		}
		assert.Equal(t, fmt.Sprintf("%s: inactive", name), strings.Join(got, "\n"), c.want)
	}
}

func TestGuardOfAnotherOwnerStays(t *testing.T) {
	newer := policy.OwnedBy("/other")
	newer.Schema++
	for owner, want := range map[policy.Owner]error{policy.OwnedBy("/other"): enforce.ErrOtherDataDir, newer: store.ErrNewer} {
		f := newFixture(t)
		f.mustBeInSync(f.sync(network("podnet", "A")))
		f.kernel.Guards = []policy.Guard{{Chain: "A", Family: policy.IPv4, Owner: owner}}
		if err := f.sync(network("podnet", "A", guard(policy.GuardCount))).Err("A"); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
		if err := f.sync(network("podnet", "A")).Err("A"); !errors.Is(err, want) { // although it does not ask for a guard
			t.Errorf("error %v, want %v", err, want)
		}
		if f.sync(network("podnet", "B")); f.kernel.count("remove ") == 0 { // which is stale then
			t.Error("chain A is not removed")
		}
		if _, err := f.removeAll("A"); err != nil {
			t.Error(err)
		}
		if len(f.kernel.Guards) != 1 || !slices.ContainsFunc(f.warnings, func(w string) bool { return strings.Contains(w, "not removed") }) {
			t.Errorf("guards %v, warnings %q", f.kernel.Guards, f.warnings)
		}
	}
}

// A policy whose guard cannot change with it is not stored and not written at all, and nothing of it is on record.
func TestRefusedGuardRefusesThePolicy(t *testing.T) {
	newer := policy.OwnedBy("/var/lib/cni/ip-masq")
	newer.Schema++
	for owner, want := range map[policy.Owner]error{policy.OwnedBy("/other"): enforce.ErrOtherDataDir, newer: store.ErrNewer} {
		for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
			f := newFixture(t)
			other := network("other", "B", backend(b))
			before := network("podnet", "A", backend(b), exempts("10.0.0.0/8"))
			f.mustApply(before, other)
			f.kernel.Guards = []policy.Guard{{Chain: "A", Family: policy.IPv4, Owner: owner, Mode: policy.GuardDrop}}
			rules, record := f.kernel.dump(), f.record()
			f.kernel.log = nil
			for range 2 {
				if _, err := f.apply(network("podnet", "A", backend(b), exempts("10.0.0.0/8", "192.0.2.0/24")), other); !errors.Is(err, want) {
					t.Errorf("%s: error %v, want %v", b, err, want)
				}
			}
			f.writes()
			assert.Equal(t, fmt.Sprintf("%s: rules", b), f.kernel.dump(), rules)
			assert.Equal(t, fmt.Sprintf("%s: record", b), f.record(), record)
			if state, err := f.enforcer.Dir.Load(); err != nil || !state.Find(before.ID).Policy.Equal(before.Policy) {
				t.Errorf("stored %+v, %v", state.Sources, err) // a repair would write its rules later
			}
		}
	}
}

// TestPodBesideADamagedDocument: an ADD passes beside a damaged document, and the rules stay as they are. Its pod is exempt as soon
// as the document is written again.
func TestPodBesideADamagedDocument(t *testing.T) {
	f := newFixture(t)
	lists := func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} }
	one, two := network("one", "A", lists), network("two", "A", lists)
	f.mustApply(one)
	f.mustApply(two, one)
	must(t, os.WriteFile(f.enforcer.Dir.DocumentPath(two.ID), []byte("{"), 0o600))
	pod := store.Attachment{Network: "one", ContainerID: "beside", IfName: "eth0"}
	must(t, f.enforcer.Dir.Attach(store.Pod{Attachment: pod, Namespace: "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.9")}}))
	p := &enforce.Proposal{Sources: []policy.Source{one, two}, Changed: []policy.Source{two}}
	lock, release := f.lock()
	defer release()
	state := assert.Must(f.enforcer.Dir.Load())(t)
	s, err := f.enforcer.Apply(t.Context(), lock, state, p)
	if exempt := f.record().Addresses(); err != nil || !s.InSync() || len(exempt) != 1 {
		t.Errorf("%v, exempt are %v", err, exempt)
	}
}

// TestGuardThatCannotBeRead: rules do not change while the guards before the change cannot be read, and the error has the cause,
// also if none is desired any more, or one could not be written before.
func TestGuardThatCannotBeRead(t *testing.T) {
	for name, mode := range map[string]policy.GuardMode{"off": policy.GuardOff, "drop": policy.GuardDrop} {
		f := newFixture(t)
		f.mustApply(network("podnet", "A", guard(policy.GuardDrop)))
		before := f.kernel.dump()
		f.kernel.fail = map[string]error{readGuards: errRefused}
		_, err := f.apply(network("podnet", "A", guard(mode), exempts("192.0.2.0/24")))
		text := fmt.Sprint(err)
		if !strings.Contains(text, "the guards cannot be read") || !strings.Contains(text, errRefused.Error()) || f.kernel.dump() != before {
			t.Errorf("%s: %s; rules:\n%s", name, text, f.kernel.dump())
		}
	}
}

// TestCleanupKeepsTheRulesOfAGuard: as long as a guard drops what is not masqueraded, cleanup removes no rule.
func TestCleanupKeepsTheRulesOfAGuard(t *testing.T) {
	for name, spoil := range map[string]func(k *kernel){
		"fails":           func(k *kernel) { k.fail = map[string]error{readGuards: errRefused} },
		"changes":         func(k *kernel) { k.fail = map[string]error{"write guards": netfilter.ErrChanged} },
		"another dataDir": func(k *kernel) { k.Guards[0].Owner = policy.OwnedBy("/other") },
	} {
		f := newFixture(t)
		f.mustBeInSync(f.sync(network("podnet", "A", guard(policy.GuardDrop))))
		before := f.kernel.dump()
		spoil(f.kernel)
		if removed, err := f.removeAll("A"); err == nil || len(removed) > 0 || f.kernel.dump() != before {
			t.Errorf("%s: removed %v, %v; rules:\n%s", name, removed, err, f.kernel.dump())
		}
	}
	f := newFixture(t)
	f.mustBeInSync(f.sync(network("podnet", "A", guard(policy.GuardDrop))))
	f.kernel.fail, f.kernel.most, f.kernel.effects = map[string]error{"write guards": netfilter.ErrChanged}, 2, nil
	if _, err := f.removeAll("A"); err != nil || len(f.kernel.Guards) > 0 || f.kernel.count(readGuards) != 3 {
		t.Errorf("%v, guards %v after %d readings", err, f.kernel.Guards, f.kernel.count(readGuards))
	}
}

// Cleanup removes what is on record or names this dataDir, and what an interrupted write left. Other chains stay.
func TestCleanup(t *testing.T) {
	f := newFixture(t)
	sources := []policy.Source{
		network("one", "A", guard(policy.GuardDrop), enforceExempt), network("two", "B", guard(policy.GuardOff), enforceExempt),
		network("three", "C"), network("four", "D", guard(policy.GuardDrop)),
	}
	f.mustApply(sources...)
	f.kernel.fail = map[string]error{"write nftables": errRefused}
	sources = append(sources, network("five", "N", backend(policy.NFTables)))
	_, _ = f.apply(sources...)
	if s := f.observe(sources...); len(s.Find("N").Observed.Unrecognized) == 0 {
		t.Error("an interrupted write left nothing")
	}
	f.kernel.fail, f.kernel.effects = nil, nil
	f.kernel.reviseChains(func(_ netfilter.Choice, c *policy.Chain) { c.Owner = policy.Owner{} })
	f.putRecord(func(r *store.Record) {
		r.Chains = slices.DeleteFunc(r.Chains, func(o store.OwnedChain) bool { return o.Chain == "C" })
	})
	removed, err := f.removeAll("A", "B", "C", "D")
	var names []string
	for _, c := range removed {
		names = append(names, c.Chain)
	}
	if want := "guard-A enforce-A enforce-B guard-D A B D"; err != nil || strings.Join(names, " ") != want || f.kernel.count("remove [] from nftables") != 1 {
		t.Errorf("%v, removed %q, effects %q", err, names, f.kernel.effects)
	}
	if len(f.kernel.Chains[netfiltertest.IPTables]) != 1 || !slices.ContainsFunc(f.warnings, func(w string) bool { return strings.Contains(w, "chain C (ipv4)") }) {
		t.Errorf("warnings %q, left is\n%s", f.warnings, f.kernel.dump())
	}
}

func (f *fixture) removeAll(chains ...string) ([]netfilter.OwnedChain, error) {
	f.Helper()
	lock, release := f.lock()
	defer release()
	return f.enforcer.RemoveAll(context.Background(), chains, f.record(), lock)
}

// A dry run finds out whether the guard could be written, and writes nothing.
func TestGuardDryRun(t *testing.T) {
	f := newFixture(t)
	f.sync(network("podnet", "A"))
	f.kernel.log = nil
	for _, unable := range []error{nil, errRefused} {
		f.kernel.fail = map[string]error{"ask for a write of guards": unable}
		if err := f.dryRun(network("podnet", "A", guard(policy.GuardDrop))).Err("A"); !errors.Is(err, unable) {
			t.Errorf("error %v, want %v", err, unable)
		}
	}
	f.kernel.fail = nil
	f.mustApply(network("podnet", "A", guard(policy.GuardDrop)))
	f.kernel.log, f.kernel.fail = nil, map[string]error{"ask for a write of guards": errRefused}
	if err := f.dryRun(network("podnet", "A")).Err("A"); !errors.Is(err, errRefused) {
		t.Errorf("without a guard: %v", err)
	}
	f.writes()
}

// A dry run that would write one chain still finds that another one belongs to another program.
func TestDryRunBesideAForeignChain(t *testing.T) {
	f := newFixture(t)
	foreign := policy.Chain{Family: policy.IPv4, Name: "A", Rules: []policy.Rule{{Verdict: policy.Unrecognized}}}
	f.kernel.Chains[netfiltertest.IPTables][policy.ChainFamily{Family: policy.IPv4, Chain: "A"}] = foreign
	a, b := network("one", "A", backend(policy.IPTables)), network("two", "B", backend(policy.IPTables))
	if s := f.observe(a, b); len(s.Find("A").Diff) > 0 {
		t.Errorf("it differs: %v", s.Diff())
	}
	if s := f.dryRun(a, b); !errors.Is(s.Err("A"), netfilter.ErrNotOwned) || s.Err("B") != nil {
		t.Errorf("errors %v, and %v", s.Err("A"), s.Err("B"))
	}
}

// TestResetsOnRecord checks which walks through the conntrack table are recorded before rules are written.
func TestResetsOnRecord(t *testing.T) {
	resets := func(s *policy.SourcePolicy) {
		s.StaleConnections, s.PodCIDRs = policy.ResetConnections, prefixes("10.88.0.0/16")
	}
	keep := func(s *policy.SourcePolicy) { s.StaleConnections = policy.KeepConnections }
	learned := func(s *policy.SourcePolicy) { s.StaleConnections = policy.ResetConnections }
	dropsLearned := func(s *policy.SourcePolicy) { s.Guard = policy.GuardDrop }
	drop, count, more := guard(policy.GuardDrop), guard(policy.GuardCount), exempts("192.0.2.0/24")
	twoRanges := func(s *policy.SourcePolicy) {
		s.Guard, s.PodCIDRs = policy.GuardDrop, prefixes("10.88.0.0/16", "10.89.0.0/16")
	}
	a, changed := network("one", "A", resets), network("one", "A", resets, more)
	b, c := network("two", "B", resets, func(s *policy.SourcePolicy) { s.Guard = policy.GuardCount }), network("three", "C")
	keeps := network("one", "A", drop, keep)
	list := func(s ...policy.Source) []policy.Source { return s }
	lose := func(k *kernel) { k.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{} }
	loseOf := func(chain string, what func(*policy.Chain)) func(*kernel) {
		return func(k *kernel) {
			k.reviseChains(func(_ netfilter.Choice, c *policy.Chain) {
				if c.Name == chain {
					what(c)
				}
			})
		}
	}
	jump, rule, rules := func(c *policy.Chain) { c.Jumps = nil }, func(c *policy.Chain) { c.Rules = c.Rules[1:] }, func(c *policy.Chain) { c.Rules = nil }
	noGuards := func(k *kernel) { k.fail = map[string]error{readGuards: netfilter.ErrUnusable} }
	foreign := func(k *kernel) {
		k.reviseChains(func(_ netfilter.Choice, c *policy.Chain) { c.Owner = policy.OwnedBy("/other") })
	}
	type row struct {
		before, after []policy.Source
		other         func(*kernel)
		want          string
	}
	applied := map[string]row{
		"first rules":                       {nil, list(a), nil, "untranslated"},
		"first rules that keep":             {nil, list(keeps), nil, ""},
		"nothing":                           {list(a), list(a), nil, ""},
		"lost rules":                        {list(a), list(a), lose, "untranslated"},
		"lost jump":                         {list(a), list(a), loseOf("A", jump), "untranslated"},
		"a subnet and a lost rule":          {list(a), list(withSubnet(a)), loseOf("A", rule), "untranslated"},
		"lost rules of a chain":             {list(a), list(a), loseOf("A", rules), "untranslated"},
		"lost jump of a chain that keeps":   {list(a, c), list(a, c), loseOf("C", jump), ""},
		"rules that cannot be read":         {list(a), list(a), func(k *kernel) { k.fail = map[string]error{"observe " + inIPTables: errRefused} }, ""},
		"lost rules that keep":              {list(keeps), list(keeps), lose, ""},
		"policy and lost rules":             {list(a), list(changed), lose, "before one, untranslated"},
		"policy":                            {list(a), list(changed), nil, "before one"},
		"another network":                   {list(a), list(a, b), nil, "before one"},
		"replaced network":                  {list(a), list(b), nil, "untranslated"},
		"another network of the chain":      {list(a), list(network("two", "A", resets, more)), nil, "before one"},
		"removed network":                   {list(a, b), list(a), nil, ""},
		"renamed chain":                     {list(a), list(network("one", "B", resets)), nil, "before one"},
		"merged into another chain":         {list(a, network("two", "B", resets)), list(network("one", "B", resets), network("two", "B", resets)), nil, "before one, before two"},
		"keep":                              {list(a), list(network("one", "A", drop, keep, more)), nil, ""},
		"guard drop":                        {list(network("one", "A")), list(network("one", "A", drop)), nil, "untranslated"},
		"guard drop after reset":            {list(a), list(network("one", "A", resets, drop)), nil, "untranslated"},
		"guard drop after count":            {list(network("one", "A", count, learned)), list(network("one", "A", drop)), nil, "untranslated"},
		"guard drop without nf_tables":      {list(a), list(network("one", "A", resets, drop)), noGuards, ""},
		"guard drop of another":             {list(network("one", "A", drop), network("two", "B", resets)), list(network("one", "A", drop), network("two", "B", resets, drop)), nil, "untranslated"},
		"guard drop of another that keeps":  {list(a, network("two", "B", keep)), list(a, network("two", "B", drop, keep)), nil, ""},
		"guard drop as it is":               {list(network("one", "A", drop)), list(network("one", "A", drop)), nil, ""},
		"guard count":                       {list(network("one", "A")), list(network("one", "A", count)), nil, ""},
		"found subnet":                      {list(network("one", "A", dropsLearned)), list(withSubnet(network("one", "A", dropsLearned))), nil, "untranslated"},
		"another subnet":                    {list(network("one", "A", drop)), list(network("one", "A", twoRanges)), nil, "untranslated"},
		"found subnet beside another guard": {list(b, network("one", "A", dropsLearned)), list(b, withSubnet(network("one", "A", dropsLearned))), nil, "untranslated"},
		"found subnet of one that keeps":    {list(a, c), list(a, withSubnet(c)), nil, ""},
		"no subnet":                         {list(network("one", "A", learned)), list(network("one", "A", learned, more)), nil, "before one"},
	}
	synced := map[string]row{
		"first rules":                     {nil, list(a), nil, "untranslated"},
		"lost rule":                       {list(a), list(a), loseOf("A", rule), "untranslated"},
		"lost jump of a chain that keeps": {list(a, c), list(a, c), loseOf("C", jump), ""},
		"chain of another":                {list(a), list(a), foreign, ""},
	}
	for operation, rows := range map[string]map[string]row{"apply": applied, "sync": synced} {
		for name, c := range rows {
			f := newFixture(t)
			if c.before != nil {
				f.mustApply(c.before...)
				f.putRecord(func(r *store.Record) { r.Resets = nil })
			}
			if c.other != nil {
				c.other(f.kernel)
			}
			if operation == "apply" {
				_, _ = f.apply(c.after...)
			} else {
				f.sync(c.after...)
			}
			var got []string
			for _, r := range f.record().Resets {
				if r.Before == nil {
					got = append(got, "untranslated")
				} else if len(r.Before) == 0 {
					got = append(got, "before nothing")
				}
				for _, s := range r.Before {
					got = append(got, "before "+s.ID.Name)
				}
			}
			assert.Equal(t, fmt.Sprintf("%s, %s: resets", operation, name), strings.Join(got, ", "), c.want)
		}
	}
}

func withSubnet(s policy.Source) policy.Source {
	s.PodSubnets = prefixes("10.88.0.0/16")
	return s
}

// The first pod range of a policy makes up for the reset after the first rules, which had none to judge by.
func TestResetWhenTheFirstRangeIsKnown(t *testing.T) {
	f := newFixture(t)
	resets := func(s *policy.SourcePolicy) { s.StaleConnections = policy.ResetConnections }
	f.mustApply(network("one", "A", resets))
	f.enforcer.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		t.Error("a walk that can find nothing")
		return nil, nil
	}
	if _, _, err := f.enforcer.ResetConnections(t.Context()); err != nil || len(f.record().Resets) > 0 {
		t.Errorf("%v, resets %+v", err, f.record().Resets)
	}
	for _, want := range []int{1, 1} { // and no other one
		s, err := f.apply(withSubnet(network("one", "A", resets)))
		if got := f.record().Resets; err != nil || len(got) != want || !got[0].FindsUntranslated() || !s.ResetsDue() {
			t.Errorf("%v, resets %+v, due now %t", err, got, s.ResetsDue())
		}
	}
}

// Rules do not wait for the record of a reset.
func TestRepairWithoutReset(t *testing.T) {
	f := newFixture(t)
	dir := t.TempDir()
	must(t, unix.Mount("data", dir, "tmpfs", 0, "size=256k,mode=0700"))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	f.enforcer.Dir = store.Open(dir + "/data")
	net := network("one", "A", guard(policy.GuardDrop))
	f.mustApply(net)
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	lose := func() { f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{} }
	lose()
	// While a repair fails no reset is due: nothing would translate the connections.
	f.kernel.fail = map[string]error{writeRules: errRefused}
	if s := f.sync(net); s.Err("A") == nil || s.ResetsDue() {
		t.Errorf("error %v, resets %v are due", s.Err("A"), f.record().Resets)
	}
	f.kernel.fail = nil
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	ballast, err := os.Create(dir + "/ballast")
	for err == nil {
		_, err = ballast.Write(make([]byte, 4096))
	}
	if s := f.sync(net); s.Differs() || s.Err("A") != nil || !errors.Is(s.RecordErr, unix.ENOSPC) {
		t.Errorf("%v, error %v, record %v", s.Diff(), s.Err("A"), s.RecordErr)
	}
	f.mustBeInSync(f.observe(net))
	if !slices.ContainsFunc(f.warnings, func(w string) bool { return strings.Contains(w, "connections are not reset") }) {
		t.Errorf("warnings %q", f.warnings)
	}
	must(t, errors.Join(ballast.Close(), os.Remove(ballast.Name())))
	lose()
	f.mustBeInSync(f.sync(net))
	if len(f.record().Resets) != 1 {
		t.Errorf("resets %v", f.record().Resets)
	}
}

// A reset that is on record already is renewed, because a walk may be under way.
func TestResetIsRenewed(t *testing.T) {
	f := newFixture(t)
	net := network("one", "A", guard(policy.GuardDrop))
	f.mustBeInSync(f.sync(net))
	first := f.record().Resets
	f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{}
	f.mustBeInSync(f.sync(net))
	second := f.record().Resets
	if len(first) != 1 || len(second) != 1 || first[0].At >= second[0].At {
		t.Errorf("resets %v, then %v", first, second)
	}
	// Without an end of the changes the first ones are forgotten, and rules that are lost have their own.
	for i := range 10 {
		f.putRecord(func(r *store.Record) { r.Resets = slices.DeleteFunc(r.Resets, store.Reset.FindsUntranslated) })
		f.mustApply(network("one", "A", guard(policy.GuardDrop), exempts(fmt.Sprintf("192.0.%d.0/24", i))))
	}
	f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{}
	f.mustApply(network("one", "A", guard(policy.GuardDrop), exempts("192.0.10.0/24")))
	if got := f.record().Resets; len(got) >= 10 || got[len(got)-2].Before == nil || !got[len(got)-1].FindsUntranslated() {
		t.Errorf("resets %v", got)
	}
}

func (f *fixture) putRecord(edit func(*store.Record)) {
	f.Helper()
	lock, release := f.lock()
	defer release()
	rec := f.record()
	edit(&rec)
	must(f, lock.PutRecord(rec))
}

// TestResetConnections checks that a walk judges by the policies before and now, holds no lock, and takes off
// the record what it was for.
func TestResetConnections(t *testing.T) {
	f := newFixture(t)
	old := network("one", "A", guard(policy.GuardDrop), exempts("10.0.0.0/8"))
	now := network("one", "A", guard(policy.GuardDrop), exempts("192.0.2.0/24"))
	f.mustApply(old)
	stale := policy.Connection{Src: addr("10.88.0.2"), Dst: addr("10.0.0.5"), ReplySrc: addr("10.0.0.5"), ReplyDst: addr("10.88.0.2")}
	untranslated := policy.Connection{Src: addr("10.88.0.2"), Dst: addr("8.8.8.8"), ReplySrc: addr("8.8.8.8"), ReplyDst: addr("10.88.0.2")}
	var found []string
	var walkErr error
	during := func() {}
	f.enforcer.Conntrack = func(_ context.Context, j *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		found = nil
		for name, c := range map[string]policy.Connection{"changed": stale, "untranslated": untranslated} {
			if _, is := j.Judge(&c, noRoutes{}); is {
				found = append(found, name)
			}
		}
		slices.Sort(found)
		during()
		return nil, walkErr
	}
	reset := func(want string, wantErr error) time.Duration {
		t.Helper()
		found = nil
		_, next, err := f.enforcer.ResetConnections(t.Context())
		if !errors.Is(err, wantErr) {
			t.Errorf("error %v, want %v", err, wantErr)
		}
		assert.Equal(t, "connections", strings.Join(found, " "), want)
		return next
	}
	walkErr = errors.New("walk")
	reset("untranslated", walkErr)
	walkErr = nil
	reset("", nil) // the next try is later
	later := func() { f.putRecord(func(r *store.Record) { r.LastReset = 1 }) }
	later()
	during = func() { // the lock is free, and a change of rules needs another walk
		f.kernel.Chains[netfiltertest.IPTables] = map[policy.ChainFamily]policy.Chain{}
		f.sync(old)
	}
	reset("untranslated", nil)
	during = func() {}
	if rec := f.record(); len(rec.Resets) != 1 || rec.LastReset == 0 {
		t.Errorf("record %+v", rec)
	}
	if next := reset("", nil); next <= 0 || next > 10*time.Second {
		t.Errorf("the next reset is due in %s", next)
	}
	f.mustApply(now)
	next := reset("changed", nil)
	if rec := f.record(); len(rec.Resets) != 1 || rec.Resets[0].Before != nil || next == 0 {
		t.Errorf("record %+v, next %s", rec, next)
	}
	f.putRecord(func(r *store.Record) { r.LastReset = 1 })
	reset("changed untranslated", nil)
	if rec := f.record(); len(rec.Resets) > 0 {
		t.Errorf("record %+v", rec)
	}
	assert.Equal(t, "the next reset", reset("", nil), 0)

	// None walks while a document cannot be read.
	files, err := filepath.Glob(f.enforcer.Dir.Path() + "/sources/*")
	must(t, err)
	document, err := os.ReadFile(files[0])
	must(t, errors.Join(err, os.WriteFile(files[0], []byte("{"), 0o600)))
	f.putRecord(func(r *store.Record) { r.Resets = []store.Reset{{At: 1}} })
	found = nil
	if _, _, err := f.enforcer.ResetConnections(t.Context()); err == nil || found != nil {
		t.Errorf("error %v, connections %q", err, found)
	}
	must(t, os.WriteFile(files[0], document, 0o600))
	f.putRecord(func(r *store.Record) { r.Resets = nil })

	// One process walks at a time, and none without the time for it.
	f.mustApply(old)
	running, err := f.enforcer.Dir.ResetLock(t.Context())
	must(t, err)
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	walks := 0
	during = func() { walks++ }
	if _, _, err := f.enforcer.ResetConnections(short); !errors.Is(err, store.ErrBusy) || walks > 0 {
		t.Errorf("beside another walk: %v, %d walks", err, walks)
	}
	assert.NoError(t, running.Close())
	if reset("", nil); walks != 1 {
		t.Errorf("%d walks", walks)
	}
}

// TestDeletedConnectionsAreOnRecord: those of all walks, in what becomes of the record.
func TestDeletedConnectionsAreOnRecord(t *testing.T) {
	f := newFixture(t)
	one, other := network("one", "A", guard(policy.GuardDrop)), network("two", "B", guard(policy.GuardDrop))
	a, b := policy.ChainFamily{Chain: "A", Family: policy.IPv4}, policy.ChainFamily{Chain: "B", Family: policy.IPv4}
	var walkErr error
	deleted := map[policy.ChainFamily]uint64{}
	f.enforcer.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		return deleted, walkErr
	}
	walk := func(want ...store.Deleted) {
		t.Helper()
		f.putRecord(func(r *store.Record) { r.LastReset, r.Resets = 0, []store.Reset{{At: 1}} })
		if _, _, err := f.enforcer.ResetConnections(t.Context()); !errors.Is(err, walkErr) {
			t.Error(err)
		}
		assert.Equal(t, "deleted connections", f.record().Deleted, want)
	}
	f.mustApply(one, other)
	walk()
	deleted = map[policy.ChainFamily]uint64{b: 2, a: 7}
	walk(store.Deleted{ChainFamily: a, Connections: 7}, store.Deleted{ChainFamily: b, Connections: 2})
	deleted, walkErr = map[policy.ChainFamily]uint64{a: 1}, errors.New("it ran out of time")
	walk(store.Deleted{ChainFamily: a, Connections: 8}, store.Deleted{ChainFamily: b, Connections: 2})
	walkErr = nil
	f.mustApply(network("one", "A", guard(policy.GuardDrop), exempts("192.0.2.0/24")), other)
	f.sync(one)
	walk(store.Deleted{ChainFamily: a, Connections: 9}) // chain B is gone
	f.putRecord(func(r *store.Record) { *r = store.Record{} })
	f.sync(one)
	walk(store.Deleted{ChainFamily: a, Connections: 1})
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

type noRoutes struct{}

func (noRoutes) IsLocal(netip.Addr) bool                       { return false }
func (noRoutes) OutputInterface(netip.Addr, netip.Addr) string { return "" }

// TestGuardThatCannotBeWritten: the kernel tells of an expression that it does not have when it is written,
// or asked to check it. The guard is inactive then, and no difference that each sync would try to repair.
func TestGuardThatCannotBeWritten(t *testing.T) {
	f := newFixture(t)
	unusable := fmt.Errorf("no fib: %w", netfilter.ErrUnusable)
	f.kernel.fail = map[string]error{"write guards": unusable, "ask for a write of guards": unusable}
	s := f.sync(network("podnet", "A", guard(policy.GuardCount)))
	if f.mustBeInSync(s); len(s.Guard.Inactive) != 1 {
		t.Errorf("inactive are %v", s.Guard.Inactive)
	}
	s = f.observe(network("podnet", "A", guard(policy.GuardCount)))
	if f.mustBeInSync(s); len(s.Guard.Inactive) != 1 || len(s.Guard.Diff) > 0 {
		t.Errorf("observed again: inactive are %v, the difference is %v", s.Guard.Inactive, s.Guard.Diff)
	}
}

// TestGuardOfAPodThatLeavesIsNoDrift: a sync between the two steps of a DEL finds the record of an exempt pod gone. What
// it writes then is no repair: no other program changed the guard.
func TestGuardOfAPodThatLeavesIsNoDrift(t *testing.T) {
	f := newFixture(t)
	source := network("podnet", "A", guard(policy.GuardDrop), func(s *policy.SourcePolicy) { s.NonMasqueradeNamespaces = []string{"prod"} })
	pod := store.Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}
	must(t, f.enforcer.Dir.Attach(store.Pod{Attachment: pod, Namespace: "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.5")}}))
	f.mustBeInSync(f.sync(source))
	must(t, f.enforcer.Dir.Detach(pod))
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	for _, all := range []bool{true, false} {
		f.enforcer.RereadExempt, f.enforcer.Reread = all, []store.Attachment{pod}
		s := f.observe(source)
		if !slices.ContainsFunc(s.Diff(), func(c policy.Change) bool { return c.Kind == policy.GuardChange || c.Kind == policy.ElementChange }) {
			t.Fatalf("the pod is not in the guard: %v", s.Diff())
		}
		if drift := s.Drift(); len(drift) > 0 {
			t.Errorf("unexpected drift: %v", drift)
		}
	}
	f.mustBeInSync(f.sync(source))
	if resets := f.record().Resets; len(resets) != 1 || resets[0].FindsUntranslated() {
		t.Errorf("resets %+v", resets)
	}
	f.kernel.Guards = nil
	if len(f.observe(source).Drift()) == 0 {
		t.Error("a guard that is gone is no drift")
	}
}

// TestResetRecordedBesideAWalk: a reset that is recorded after a walk has read the record, and before it begins, is
// none of a walk that failed, so it is due at once.
func TestResetRecordedBesideAWalk(t *testing.T) {
	f := newFixture(t)
	one := network("one", "A", guard(policy.GuardDrop))
	f.mustApply(one)
	long := one // so long that a process has time to wait for the lock, and to record, while it is decoded and merged
	for i := range 50_000 {
		long.Policy.NonMasqueradeCIDRs = append(long.Policy.NonMasqueradeCIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i)}), 24))
	}
	walks := 0
	f.enforcer.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		walks++
		return nil, nil
	}
	now := func() int64 {
		var ts unix.Timespec
		must(t, unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts))
		return ts.Nano()
	}
	for attempt := 0; ; attempt++ {
		if attempt == 20 {
			t.Fatal("no reset was recorded beside a walk")
		}
		f.putRecord(func(r *store.Record) {
			r.LastReset, r.Resets = 0, []store.Reset{{At: 1}, {At: 2, Before: []policy.Source{long}}}
		})
		var recording sync.WaitGroup
		recording.Go(func() {
			for !f.enforcer.Dir.ResetsRunning() {
				time.Sleep(100 * time.Microsecond)
			}
			time.Sleep(2 * time.Millisecond)
			f.putRecord(func(r *store.Record) {
				r.Resets = append(r.Resets, store.Reset{At: now(), Before: []policy.Source{one}})
			})
		})
		_, _, err := f.enforcer.ResetConnections(t.Context())
		recording.Wait()
		must(t, err)
		if len(f.record().Resets) > 0 {
			break
		}
	}
	before := walks
	if _, next, err := f.enforcer.ResetConnections(t.Context()); err != nil || next != 0 || walks != before+1 {
		t.Errorf("error %v, %d walks more, the next is due in %s", err, walks-before, next)
	}
}

// A walk is on record when another process has held the lock for longer than an ADD waits for it, and is not made again.
func TestWalkBesideALongWrite(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", guard(policy.GuardDrop))
	f.mustApply(net)
	f.putRecord(func(r *store.Record) { r.Resets = []store.Reset{{At: 1, Before: []policy.Source{net}}} })
	f.enforcer.Dir.LockWait = 50 * time.Millisecond
	walks, ref := 0, policy.ChainFamily{Chain: "A", Family: policy.IPv4}
	f.enforcer.Conntrack = func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
		walks++
		_, release := f.lock()
		time.AfterFunc(4*f.enforcer.Dir.LockWait, release)
		return map[policy.ChainFamily]uint64{ref: 7}, nil
	}
	for range 2 {
		_, _, err := f.enforcer.ResetConnections(t.Context())
		must(t, err)
	}
	if rec := f.record(); walks != 1 || len(rec.Resets) > 0 || !slices.Equal(rec.Deleted, []store.Deleted{{ChainFamily: ref, Connections: 7}}) {
		t.Errorf("%d walks, on record %+v", walks, rec)
	}
}
