// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type fixture struct {
	*testing.T
	kernel   *kernel
	enforcer *enforce.Enforcer
	warnings []string
}

func newFixture(t *testing.T) *fixture {
	f := &fixture{T: t, kernel: newKernel()}
	f.enforcer = &enforce.Enforcer{
		Dir:     store.Open(t.TempDir() + "/state"),
		Drivers: f.kernel.drivers(),
		Warn: func(err error) {
			if err != nil {
				f.warnings = append(f.warnings, err.Error())
			}
		},
	}
	return f
}

// lock takes the lock of the dataDir.
func (f *fixture) lock() (lock *store.Lock, release func()) {
	f.Helper()
	lock, err := f.enforcer.Dir.Lock(context.Background())
	if err != nil {
		f.Fatal(err)
	}
	return lock, func() {
		f.Helper()
		if err := lock.Release(); err != nil {
			f.Error(err)
		}
	}
}

// sync syncs once, with the lock and the stored record.
func (f *fixture) sync(sources ...policy.Source) *enforce.State {
	f.Helper()
	lock, release := f.lock()
	defer release()
	return f.enforcer.Sync(context.Background(), f.enforcer.Observe(context.Background(), sources, f.record()), lock)
}

func (f *fixture) observe(sources ...policy.Source) *enforce.State {
	f.Helper()
	return f.enforcer.Observe(context.Background(), sources, f.record())
}

func (f *fixture) record() store.Record {
	f.Helper()
	state, err := f.enforcer.Dir.Load()
	if err != nil {
		f.Fatal(err)
	}
	return state.Record
}

func (f *fixture) mustBeInSync(v *enforce.State) {
	f.Helper()
	if !v.InSync() {
		f.Fatalf("not right: stale %v, guard %v, chains %+v\nkernel:\n%s", v.Stale, v.Guard.Err, v.Chains, f.kernel.dump())
	}
}

func network(name, chain string, edit ...func(*policy.SourcePolicy)) policy.Source {
	s := policy.SourcePolicy{Chain: chain, NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}
	for _, e := range edit {
		e(&s)
	}
	return policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: name}, Policy: s, Order: 1}
}

func backend(b policy.Backend) func(*policy.SourcePolicy) {
	return func(s *policy.SourcePolicy) { s.Backend = b }
}

func enableIPv6(s *policy.SourcePolicy) { yes := true; s.EnableIPv6 = &yes }

func TestTornDumpIsNotRepaired(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A")
	f.sync(net)
	f.kernel.lie = 1
	if f.observe(net).InSync() {
		t.Fatal("the torn reading was not seen")
	}
	f.mustBeInSync(f.sync(net))
	if f.kernel.applied != 1 {
		t.Error("a torn reading was repaired")
	}
}

// A torn dump of a chain on record is not repaired when a proposal is applied. A new chain
// is observed once before it is written, and once after.
func TestProposalWithTornDump(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		f := newFixture(t)
		net := network("podnet", "A", backend(b))
		apply := func(sources ...policy.Source) {
			t.Helper()
			lock, err := f.enforcer.Dir.Lock(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			p := &enforce.Proposal{Sources: sources, Changed: sources}
			state := store.State{Record: f.record()}
			v, err := f.enforcer.ApplyProposal(context.Background(), lock, state, p, func(*enforce.State) error { return nil })
			if err := errors.Join(err, lock.Release()); err != nil {
				t.Fatal(err)
			}
			f.mustBeInSync(v)
		}
		apply(net)
		if f.kernel.applied != 1 || f.kernel.observed != 2 {
			t.Errorf("%s: a new chain is written %d times and observed %d times", b, f.kernel.applied, f.kernel.observed)
		}
		f.kernel.lie = 1
		apply(net)
		if f.kernel.lie != 0 || f.kernel.applied != 1 {
			t.Errorf("%s: a torn dump was repaired", b)
		}
	}
}

// If another program changes rules between the write and the observation after it, Sync
// writes once more.
func TestSyncWritesAgainIfReverted(t *testing.T) {
	for times, right := range map[int]bool{1: true, 2: false} {
		f := newFixture(t)
		f.kernel.undone = times
		if v := f.sync(network("podnet", policy.DefaultChain)); v.InSync() != right || f.kernel.applied != 2 {
			t.Errorf("undone %d times: right %t, applied %d times", times, v.InSync(), f.kernel.applied)
		}
	}
}

// A write that found other rules than were observed is tried again, although another chain
// failed for good.
func TestSyncRetriesBesideAFailedChain(t *testing.T) {
	refused := errors.New("refused")
	for name, fail := range map[string]func(*kernel){
		"before the write": func(k *kernel) { k.unable = map[policy.Family]error{policy.IPv6: refused} },
		"by the write":     func(k *kernel) { k.refused = map[netfilter.Choice]error{iptChoice: refused} },
	} {
		f := newFixture(t)
		fail(f.kernel)
		f.kernel.changed = 2
		v := f.sync(network("one", "A", backend(policy.IPTables), enableIPv6), network("two", "B", backend(policy.NFTables)))
		if err := v.Err("A"); !errors.Is(err, refused) {
			t.Errorf("%s: chain A: %v", name, err)
		}
		if err := v.Err("B"); err != nil || len(f.kernel.chains[nftChoice]) != 1 {
			t.Errorf("%s: chain B: %v\n%s", name, err, f.kernel.dump())
		}
	}
}

func TestFailedRemovalIsAWarning(t *testing.T) {
	f := newFixture(t)
	f.sync(network("podnet", "A"))
	f.kernel.noRemove[iptChoice] = errors.New("no program")
	next := network("podnet", "B")
	f.mustBeInSync(f.sync(next))
	if len(f.warnings) == 0 || !strings.Contains(f.warnings[0], "no program") {
		t.Errorf("warnings %q do not tell", f.warnings)
	}
	f.mustBeInSync(f.observe(next)) // and no ADD tries again
}

func TestUnusableRecordedBackendIsReplaced(t *testing.T) {
	f := newFixture(t)
	f.sync(network("podnet", "A"))
	gone := fmt.Errorf("iptables is not installed: %w", netfilter.ErrUnusable)
	f.kernel.unusable[iptChoice], f.kernel.unusable[legacyChoice], f.kernel.noRemove[iptChoice] = gone, gone, gone

	f.mustBeInSync(f.observe(network("podnet", "A"))) // all right: nothing to run
	changed := network("podnet", "A", enableIPv6)
	f.mustBeInSync(f.sync(changed))
	if len(f.kernel.chains[nftChoice]) != 2 {
		t.Errorf("not in nftables:\n%s", f.kernel.dump())
	}
	f.mustBeInSync(f.observe(changed))

	insists := network("podnet", "A", backend(policy.IPTables))
	if err := f.sync(insists).Err("A"); !errors.Is(err, netfilter.ErrUnusable) {
		t.Errorf("error %v, want that iptables cannot be used", err)
	}
	if len(f.kernel.chains[nftChoice]) != 2 {
		t.Errorf("the last good state is gone:\n%s", f.kernel.dump())
	}
}

// With AllBackends a chain that an agent created in another backend is found and removed;
// one of another dataDir stays and is an error.
func TestDuplicateIsRemoved(t *testing.T) {
	f := newFixture(t)
	f.enforcer.AllBackends = true
	net := network("podnet", policy.DefaultChain, func(s *policy.SourcePolicy) { s.Backend = policy.NFTables })
	f.mustBeInSync(f.sync(net))
	ref := policy.ChainFamily{Chain: policy.DefaultChain, Family: policy.IPv4}
	agents := policy.Chain{Family: policy.IPv4, Name: policy.DefaultChain, Rules: []policy.Rule{{Verdict: policy.Masquerade}}}
	f.kernel.chains[iptChoice][ref] = agents
	if v := f.observe(net); v.InSync() || len(v.Duplicates) != 1 {
		t.Errorf("it is not found: %+v", v.Duplicates)
	}
	f.mustBeInSync(f.sync(net))
	if len(f.kernel.chains[iptChoice]) > 0 {
		t.Errorf("it is left:\n%s", f.kernel.dump())
	}
	agents.Owner = policy.OwnedBy("/other")
	f.kernel.chains[iptChoice][ref] = agents
	if err := f.sync(net).Err(policy.DefaultChain); !errors.Is(err, enforce.ErrOtherDataDir) || len(f.kernel.chains[iptChoice]) != 1 {
		t.Errorf("another's chain: %v\n%s", err, f.kernel.dump())
	}
}

// If no source states a backend the preferred one is used, even if the record has another;
// without a preference the record decides.
func TestPreferredBackend(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", policy.DefaultChain)
	f.mustBeInSync(f.sync(net))
	if v := f.observe(net); v.Chains[0].Choice != iptChoice {
		t.Fatalf("without a preference it is kept in %s", v.Chains[0].Choice)
	}
	f.enforcer.PreferredBackend = policy.NFTables
	f.mustBeInSync(f.sync(net))
	f.enforcer.PreferredBackend = ""
	v := f.observe(net)
	f.mustBeInSync(v)
	if len(v.Chains) != 1 || v.Chains[0].Choice != nftChoice || len(f.kernel.chains[iptChoice]) > 0 {
		t.Errorf("it is kept in %s\n%s", v.Chains[0].Choice, f.kernel.dump())
	}
	// What a source states is stronger.
	f.enforcer.PreferredBackend = policy.NFTables
	stated := network("podnet", policy.DefaultChain, func(s *policy.SourcePolicy) { s.Backend = policy.IPTables })
	f.mustBeInSync(f.sync(stated))
	if v := f.observe(stated); v.Chains[0].Choice != iptChoice {
		t.Errorf("what a source states is kept in %s", v.Chains[0].Choice)
	}
}

// A preferred backend that is unusable fails nothing.
func TestPreferredBackendUnusable(t *testing.T) {
	f := newFixture(t)
	f.kernel.unusable[nftChoice] = errors.New("no nf_tables here")
	f.enforcer.PreferredBackend = policy.NFTables
	f.mustBeInSync(f.sync(network("podnet", policy.DefaultChain)))
	if len(f.warnings) == 0 || !strings.Contains(f.warnings[0], "no nf_tables here") {
		t.Errorf("warnings: %v", f.warnings)
	}
}

// A preferred backend in which the kernel refuses the rules fails nothing, and the warning has the kernel's reason.
func TestPreferredBackendRefused(t *testing.T) {
	f := newFixture(t)
	f.kernel.refused = map[netfilter.Choice]error{nftChoice: fmt.Errorf("no nft_masq here: %w", netfilter.ErrUnusable)}
	f.enforcer.PreferredBackend = policy.NFTables
	f.mustBeInSync(f.sync(network("podnet", policy.DefaultChain)))
	if len(f.warnings) != 1 || !strings.Contains(f.warnings[0], "preferred backend nftables: ") || !strings.Contains(f.warnings[0], "no nft_masq here") {
		t.Errorf("warnings: %q", f.warnings)
	}
	// Nothing is left to do.
	v := f.observe(network("podnet", policy.DefaultChain))
	f.mustBeInSync(v)
	if len(v.Stale) > 0 || len(f.warnings) != 2 || f.warnings[1] != f.warnings[0] {
		t.Errorf("stale: %v, warnings: %q", v.Stale, f.warnings)
	}
	f.kernel.refused = nil
	f.mustBeInSync(f.sync(network("podnet", policy.DefaultChain)))
	if len(f.kernel.chains[nftChoice]) == 0 {
		t.Errorf("the kernel takes the rules, and they are in\n%s", f.kernel.dump())
	}
}

func TestNoUsableBackend(t *testing.T) {
	f := newFixture(t)
	for _, c := range []netfilter.Choice{iptChoice, legacyChoice, nftChoice} {
		f.kernel.unusable[c] = fmt.Errorf("%s does not work: %w", c, netfilter.ErrUnusable)
	}
	v := f.sync(network("podnet", "A"))
	err := v.Err("A")
	if !errors.Is(err, netfilter.ErrUnusable) || !strings.Contains(err.Error(), "nftables does not work") {
		t.Errorf("error %v", err)
	}
	if v.Exists("A") {
		t.Error("no chain exists")
	}
}

func TestLinearChains(t *testing.T) {
	many := func(s *policy.SourcePolicy) {
		for i := range policy.DefaultCIDRLimit + 1 {
			s.NonMasqueradeCIDRs = append(s.NonMasqueradeCIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i)}), 16))
		}
	}
	for b, want := range map[policy.Backend]int{policy.IPTables: 1, policy.NFTables: 0} {
		f := newFixture(t)
		v := f.sync(network("podnet", "A", backend(b), many), network("other", "B", backend(b)))
		if slow := v.LinearChains(); len(slow) != want {
			t.Errorf("%s: %v", b, slow)
		}
	}
}

// A new chain is written in all of its families or in none. A repair does what it
// can.
func TestFamilyThatCannotBeWritten(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		t.Run(string(b), func(t *testing.T) {
			f := newFixture(t)
			both := network("both", "A", backend(b), enableIPv6)
			four := network("four", "B", backend(b))
			f.kernel.unable = map[policy.Family]error{policy.IPv6: errors.New("no IPv6 here")}
			f.sync(network("both", "A", backend(b)), four)
			stood := f.kernel.dump()
			if err := f.sync(both, four).Err("A"); err == nil || f.kernel.dump() != stood {
				t.Errorf("%v\n%s", err, f.kernel.dump())
			}
			f.kernel.unable = nil
			f.mustBeInSync(f.sync(both, four))
			if b != policy.IPTables {
				return // one batch for both families
			}
			right := f.kernel.dump()
			ref := policy.ChainFamily{Chain: "A", Family: policy.IPv4}
			c := f.kernel.chains[iptChoice][ref]
			c.Rules = slices.Clone(c.Rules)[1:]
			f.kernel.chains[iptChoice][ref] = c
			f.kernel.unable = map[policy.Family]error{policy.IPv6: errors.New("no IPv6 here")}
			f.sync(both, four)
			if now := f.kernel.dump(); now != right {
				t.Errorf("not repaired:\n%s", now)
			}
		})
	}
}
