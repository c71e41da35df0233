// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
		Drivers: f.kernel.Drivers(),
		Warn: func(err error) {
			if err != nil {
				f.warnings = append(f.warnings, err.Error())
			}
		},
	}
	return f
}

var must = assert.NoError

// lock takes the lock of the dataDir.
func (f *fixture) lock() (lock *store.Lock, release func()) {
	f.Helper()
	lock = assert.Must(f.enforcer.Dir.Lock(context.Background()))(f)
	return lock, func() {
		f.Helper()
		assert.NoError(f, lock.Release())
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
	state := assert.Must(f.enforcer.Dir.Load())(f)
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

func enableIPv6(s *policy.SourcePolicy) { s.EnableIPv6 = new(true) }

// A torn dump of a chain on record is not repaired when a proposal is applied. A new chain
// is observed once before it is written, and once after.
func TestProposalWithTornDump(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		f := newFixture(t)
		net := network("podnet", "A", backend(b))
		apply := func(sources ...policy.Source) {
			t.Helper()
			lock, err := f.enforcer.Dir.Lock(context.Background())
			must(t, err)
			p := &enforce.Proposal{Sources: sources, Changed: sources}
			state := store.State{Record: f.record()}
			v, err := f.enforcer.Apply(context.Background(), lock, state, p)
			must(t, errors.Join(err, lock.Release()))
			f.mustBeInSync(v)
		}
		apply(net)
		if written, observed := f.kernel.count("write "), f.kernel.count("observe "+string(b)); written != 1 || observed != 2 {
			t.Errorf("%s: a new chain is written %d times and observed %d times", b, written, observed)
		}
		f.kernel.Torn = 1
		apply(net)
		if f.kernel.Torn != 0 || f.kernel.count("write ") != 1 {
			t.Errorf("%s: a torn dump was repaired", b)
		}
		before, looks := f.kernel.count("observe "+string(b)), 3
		if b == policy.NFTables { // whose reading of one generation is not torn
			looks = 2
		}
		apply(network("podnet", "A", backend(b), exempts("192.0.2.0/24")))
		assert.Equal(t, fmt.Sprintf("%s: how often a changed policy is observed", b), f.kernel.count("observe "+string(b))-before, looks)
	}
}

// If another program reverts a write before it is read again, Sync writes once more. It asks for nothing: no policy is new.
func TestSyncWritesAgainIfReverted(t *testing.T) {
	for _, effect := range []string{writeRules, "write guards"} {
		for times, right := range map[int]bool{0: true, 1: true, 2: false} {
			f := newFixture(t)
			net := network("podnet", "A", guard(policy.GuardDrop))
			f.mustApply(net)
			if f.kernel.Guards = nil; effect == writeRules {
				f.kernel.Flush()
			}
			f.kernel.effects, f.kernel.undone = nil, map[string]int{effect: times}
			s := f.sync(net)
			if s.InSync() != right || f.kernel.count(effect) != min(times+1, 2) || f.kernel.count(checkRules) > 0 {
				t.Errorf("%s, undone %d times: right %t, %q", effect, times, s.InSync(), f.kernel.effects)
			}
		}
	}
}

// Where another program changes rules or guards before each write, that is tried six times. What is right is no error.
func TestOvertakenSixTimes(t *testing.T) {
	for effect, others := range map[string]bool{"write nftables": true, "write guards": false} {
		for _, times := range []int{5, 6, 0} {
			f := newFixture(t)
			a, b := network("one", "A", backend(policy.NFTables), guard(policy.GuardDrop)), network("two", "B", guard(policy.GuardDrop))
			f.mustApply(a, b)
			f.kernel.effects, f.kernel.most, f.kernel.fail = nil, times, map[string]error{effect: netfilter.ErrChanged}
			if others {
				f.kernel.Chains[netfiltertest.NFTables] = map[policy.ChainFamily]policy.Chain{}
			} else {
				f.kernel.Guards = nil
			}
			s := f.sync(a, b)
			err, other := s.Err("A"), s.Err("B")
			if (err == nil) != (times == 5) || err != nil && !errors.Is(err, netfilter.ErrChanged) || others && other != nil || f.kernel.count(effect) > 6 {
				t.Errorf("%s is overtaken %d times: errors %v and %v, %q", effect, times, err, other, f.kernel.effects)
			}
		}
	}
}

// A policy that the kernel refuses is not stored where rules are in force, also if they were lost, or are an agent's. Where
// there are none, nothing is asked.
func TestRefusedPolicyIsNotStored(t *testing.T) {
	inNFT := network("one", "A", backend(policy.NFTables), guard(policy.GuardDrop))
	changed := network("one", "A", backend(policy.NFTables), guard(policy.GuardDrop), exempts("192.0.2.0/24"))
	inIPT := network("two", "B", backend(policy.IPTables))
	agents := func(f *fixture) {
		c := policy.Chain{Family: policy.IPv4, Name: "A", Rules: []policy.Rule{{Verdict: policy.Masquerade}}}
		f.kernel.Chains[netfiltertest.NFTables][policy.ChainFamily{Family: policy.IPv4, Chain: "A"}] = c
	}
	for name, c := range map[string]struct {
		rules   func(*fixture)
		sources []policy.Source
		refused bool
	}{
		"changed":           {func(f *fixture) { f.mustApply(inNFT) }, []policy.Source{changed}, true},
		"changed and lost":  {func(f *fixture) { f.mustApply(inNFT); f.kernel.Flush() }, []policy.Source{changed}, true},
		"an agent's":        {agents, []policy.Source{inNFT}, true},
		"one, then another": {func(f *fixture) { f.mustApply(inNFT) }, []policy.Source{changed, inIPT}, true},
		"another, then one": {func(f *fixture) { f.mustApply(inNFT) }, []policy.Source{inIPT, changed}, true},
		"none":              {func(*fixture) {}, []policy.Source{inNFT}, false},
	} {
		f := newFixture(t)
		c.rules(f)
		f.kernel.Chains[netfiltertest.Legacy][policy.ChainFamily{Chain: "B", Family: policy.IPv4}] = policy.Chain{Family: policy.IPv4, Name: "B"}
		before, err := f.enforcer.Dir.Load()
		must(t, err)
		f.kernel.fail, f.kernel.effects = map[string]error{"ask for a write of nftables": errRefused}, nil
		_, err = f.apply(c.sources...)
		if errors.Is(err, errRefused) != c.refused || !c.refused && err != nil {
			t.Errorf("%s: error %v, %q", name, err, f.kernel.effects)
		}
		if after, err := f.enforcer.Dir.Load(); c.refused && (!reflect.DeepEqual(before.Sources, after.Sources) || len(f.kernel.Chains[netfiltertest.Legacy]) == 0) {
			t.Errorf("%s: stored %+v, %v", name, after.Sources, err)
		}
	}
}

// A chain that a run failed to create is not on record, unless it was before, or what there is cannot be read.
func TestRecordOfAFailedRun(t *testing.T) {
	both, inNFT := network("one", "A", backend(policy.IPTables), enableIPv6), network("two", "B", backend(policy.NFTables))
	for name, c := range map[string]struct {
		known bool // and lost
		fail  []string
		want  []string
	}{
		"none":               {false, nil, []string{"A ipv4", "A ipv6", "B ipv4"}},
		"all":                {false, []string{"write "}, nil},
		"one chain":          {false, []string{writeRules}, []string{"B ipv4"}},
		"one family":         {false, []string{writeRules + " ipv6"}, []string{"A ipv4", "B ipv4"}},
		"all, of known ones": {true, []string{"write "}, []string{"A ipv4", "A ipv6", "B ipv4"}},
		"all, unreadable":    {false, []string{"write ", "observe "}, []string{"A ipv4", "A ipv6", "B ipv4"}},
	} {
		f := newFixture(t)
		if c.known {
			f.mustApply(both, inNFT)
			f.kernel.Flush()
		}
		fake := f.kernel.Before
		f.kernel.Before = func(effect string, writes bool) error {
			if writes {
				f.kernel.fail = map[string]error{}
				for _, beginning := range c.fail {
					f.kernel.fail[beginning] = errRefused
				}
			}
			return fake(effect, writes)
		}
		f.sync(both, inNFT)
		var got []string
		for _, o := range f.record().Chains {
			got = append(got, o.Chain+" "+string(o.Family))
		}
		if slices.Sort(got); !slices.Equal(got, c.want) {
			t.Errorf("%s fails: on record are %q", name, got)
		}
	}
}

// A chain that could not be read before the record was written is not written, although it can be read later.
func TestUnreadableChainIsNotWritten(t *testing.T) {
	f := newFixture(t)
	a, b := network("one", "A", backend(policy.NFTables)), network("two", "B", backend(policy.IPTables))
	f.mustApply(a)
	f.kernel.Flush()
	f.kernel.most, f.kernel.fail = 2, map[string]error{"observe " + inIPTables: errRefused, "write nftables": netfilter.ErrChanged}
	if s := f.sync(a, b); s.Err("A") != nil || s.Err("B") == nil || len(f.kernel.Chains[netfiltertest.IPTables]) > 0 {
		t.Errorf("errors %v and %v, on record are %+v", s.Err("A"), s.Err("B"), f.record().Chains)
	}
	f.mustBeInSync(f.sync(a, b))
}

// Where the record was lost the rules that are there are on it again.
func TestLostRecord(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A", enableIPv6)
	f.mustApply(net)
	for _, left := range []int{1, 0} {
		f.putRecord(func(r *store.Record) { r.Chains = r.Chains[:left] })
		if f.observe(net).InSync() {
			t.Errorf("in sync with %d chains on record", left)
		}
		f.mustBeInSync(f.sync(net))
		f.mustBeInSync(f.observe(net))
		if len(f.record().Chains) != 2 {
			t.Errorf("record %+v", f.record())
		}
	}
}

// Without the record, a failed reading does not move a chain to another backend, in which the old rules would stay
// in force beside the new ones. The next attempt finds the chain.
func TestLostRecordAndFailedReading(t *testing.T) {
	errFailed := fmt.Errorf("the kernel did not answer: %w", netfilter.ErrBusy)
	for _, fails := range [][]string{
		{"list owners in nftables"},
		{"list owners in nftables", "find chain A in nftables"},
	} {
		f := newFixture(t)
		inNFT := network("podnet", "A", backend(policy.NFTables))
		f.mustBeInSync(f.sync(inNFT))
		f.putRecord(func(r *store.Record) { r.Chains = nil })
		e := f.enforcer // of another process, which has chosen nothing yet
		f.enforcer = &enforce.Enforcer{Dir: e.Dir, Drivers: e.Drivers, Warn: e.Warn, AllBackends: true}
		agents := policy.Chain{Family: policy.IPv4, Name: "A", Rules: []policy.Rule{{Verdict: policy.Masquerade}}}
		f.kernel.Chains[netfiltertest.IPTables][policy.ChainFamily{Chain: "A", Family: policy.IPv4}] = agents
		f.kernel.fail = map[string]error{}
		for _, effect := range fails {
			f.kernel.fail[effect] = errFailed
		}
		net := network("podnet", "A") // backend auto
		if err := f.sync(net).Err("A"); !errors.Is(err, netfilter.ErrBusy) {
			t.Errorf("%v fail: %v", fails, err)
		}
		if f.kernel.count(writeRules) > 0 {
			t.Errorf("%v fail: the chain moved:\n%s", fails, f.kernel.dump())
		}
		f.kernel.fail = nil
		s := f.sync(net)
		f.mustBeInSync(s)
		if s.Chains[0].Choice != netfiltertest.NFTables {
			t.Errorf("chosen is %s", s.Chains[0].Choice)
		}
	}
}

// With AllBackends a chain that names this dataDir is removed although neither the record nor a policy knows it.
func TestOrphanIsRemoved(t *testing.T) {
	f := newFixture(t)
	net, six := network("podnet", "A", guard(policy.GuardDrop)), network("six", "C", enableIPv6)
	f.mustBeInSync(f.sync(net, network("lost", "B"), six))
	f.putRecord(func(r *store.Record) {
		r.Chains = slices.DeleteFunc(r.Chains, func(o store.OwnedChain) bool { return o.Chain == "B" || o.Family == policy.IPv6 })
	})
	f.mustBeInSync(f.observe(net, network("six", "C"))) // an ADD does not look for it
	f.enforcer.AllBackends = true
	if s := f.observe(net, six); len(s.Stale) != 1 {
		t.Errorf("stale are %v", s.Stale)
	}
	if s := f.observe(net); len(s.Stale) != 3 { // one of them is on record
		t.Errorf("stale are %v", s.Stale)
	}
	if s := f.observe(net, network("six", "C")); s.InSync() || len(s.Stale) != 2 {
		t.Errorf("stale are %v", s.Stale)
	}
	record := f.record()
	f.putRecord(func(r *store.Record) { r.Chains = nil }) // and with it the documents that may ask for them
	if s := f.observe(net); len(s.Stale) > 0 {
		t.Errorf("stale are %v", s.Stale)
	}
	f.putRecord(func(r *store.Record) { r.Chains = record.Chains })
	f.sync(net, network("lost", "B"))
	if s := f.observe(net, network("lost", "B", backend(policy.NFTables))); len(s.Stale) != 1 {
		t.Errorf("stale are %v", s.Stale)
	}
	f.putRecord(func(r *store.Record) { r.Chains = record.Chains })
	f.sync(net)
	if s := f.observe(net); !s.InSync() || len(f.kernel.Chains[netfiltertest.IPTables]) != 1 {
		t.Errorf("stale are %v, the kernel has\n%s", s.Stale, f.kernel.dump())
	}
}

// With AllBackends a chain that an agent created in another backend is found and removed;
// one of another dataDir stays and is an error.
func TestDuplicateIsRemoved(t *testing.T) {
	f := newFixture(t)
	f.enforcer.AllBackends = true
	net := network("podnet", policy.DefaultChain, backend(policy.NFTables))
	f.mustBeInSync(f.sync(net))
	if s := f.observe(network("podnet", policy.DefaultChain, backend(policy.IPTables))); len(s.Stale) != 1 || len(s.Duplicates) > 0 {
		t.Errorf("a chain that moves: stale %v, duplicates %v", s.Stale, s.Duplicates)
	}
	ref := policy.ChainFamily{Chain: policy.DefaultChain, Family: policy.IPv4}
	agents := policy.Chain{Family: policy.IPv4, Name: policy.DefaultChain, Rules: []policy.Rule{{Verdict: policy.Masquerade}}}
	f.kernel.Chains[netfiltertest.IPTables][ref] = agents
	if v := f.observe(net); v.InSync() || len(v.Duplicates) != 1 {
		t.Errorf("it is not found: %+v", v.Duplicates)
	}
	f.dryRun(net)
	f.mustBeInSync(f.sync(net))
	if len(f.kernel.Chains[netfiltertest.IPTables]) > 0 {
		t.Errorf("it is left:\n%s", f.kernel.dump())
	}
	foreign := agents
	foreign.Rules = []policy.Rule{{Verdict: policy.Unrecognized}}
	f.kernel.Chains[netfiltertest.IPTables][ref] = foreign
	if f.sync(net); len(f.kernel.Chains[netfiltertest.IPTables]) != 1 {
		t.Error("a third party's chain is removed")
	}
	delete(f.kernel.Chains[netfiltertest.IPTables], ref)
	own := network("own", "A", backend(policy.IPTables))
	f.mustApply(net, own)
	f.kernel.Chains[netfiltertest.NFTables][policy.ChainFamily{Chain: "A", Family: policy.IPv4}] = policy.Chain{Family: policy.IPv4, Name: "A"}
	f.kernel.fail = map[string]error{"write nftables": errRefused}
	f.sync(network("podnet", policy.DefaultChain, backend(policy.NFTables), exempts("192.0.2.0/24")), own)
	if len(f.kernel.Chains[netfiltertest.NFTables]) != 1 {
		t.Errorf("beside a duplicate:\n%s", f.kernel.dump())
	}
	f.kernel.fail = nil
	f.sync(net)
	agents.Owner = policy.OwnedBy("/other")
	f.kernel.Chains[netfiltertest.IPTables][ref] = agents
	f.dryRun(net)
	if err := f.sync(net).Err(policy.DefaultChain); !errors.Is(err, enforce.ErrOtherDataDir) || len(f.kernel.Chains[netfiltertest.IPTables]) != 1 {
		t.Errorf("another's chain: %v\n%s", err, f.kernel.dump())
	}
}

// The backend of a chain is the one on record, or that has it, unless the policy states another one. Else it is the first that
// accepts the rules.
func TestChoice(t *testing.T) {
	nft := []store.OwnedChain{{Chain: "A", Family: policy.IPv4, Backend: policy.NFTables}}
	stuck := []store.OwnedChain{{Chain: "A", Family: policy.IPv4, Backend: policy.NFTables, RemovalFailed: true}}
	for name, c := range map[string]struct {
		record []store.OwnedChain
		boot   string
		owner  string // of a chain in nftables
		stated policy.Backend
		fail   string
		want   netfilter.Choice
	}{
		"the first":            {nil, "", "", "", "", netfiltertest.IPTables},
		"the first is refused": {nil, "", "", "", checkRules, netfiltertest.NFTables},
		"on record":            {nft, "", "", "", "", netfiltertest.NFTables},
		"not removed":          {stuck, "", "", "", "", netfiltertest.IPTables},
		"of the last boot":     {nft, "last", "", "", "", netfiltertest.NFTables},
		"of it, not stated":    {nft, "last", "", policy.IPTables, "", netfiltertest.IPTables},
		"of it, not removed":   {stuck, "last", "", "", "", netfiltertest.IPTables},
		"another is stated":    {nft, "", "", policy.IPTables, "", netfiltertest.IPTables},
		"in the kernel":        {nil, "", "own", "", "", netfiltertest.NFTables},
		"there, not stated":    {nil, "", "own", policy.IPTables, "", netfiltertest.IPTables},
		"of another dataDir":   {nil, "", "/other", "", "", netfiltertest.IPTables},
	} {
		f := newFixture(t)
		if c.owner != "" {
			f.addChain("A", policy.IPv4)
			f.kernel.Chains[netfiltertest.IPTables][policy.ChainFamily{Chain: "A", Family: policy.IPv4}] = policy.Chain{Family: policy.IPv4, Name: "A"} // an agent's
		}
		if c.owner == "/other" {
			f.kernel.reviseChains(func(in netfilter.Choice, c *policy.Chain) {
				if in == netfiltertest.NFTables {
					c.Owner = policy.OwnedBy("/other")
				}
			})
		}
		f.kernel.fail = map[string]error{"no effect": nil}
		if c.fail != "" {
			f.kernel.fail = map[string]error{c.fail: netfilter.ErrUnusable}
		}
		rec := store.Record{Boot: cmp.Or(c.boot, f.enforcer.Dir.Boot()), Chains: c.record}
		for range 2 {
			s := f.enforcer.Observe(t.Context(), []policy.Source{network("one", "A", backend(c.stated))}, rec)
			if got := s.Chains[0].Choice; got != c.want || f.kernel.count("find chain A in iptables") > 1 {
				t.Errorf("%s: %s, effects %q", name, got, f.kernel.effects)
			}
		}
	}
	many := network("one", "A", backend(policy.IPTables))
	for i := range policy.MaxPodCIDRs + 1 {
		many.Policy.PodCIDRs = append(many.Policy.PodCIDRs, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i)}), 32))
	}
	if err := newFixture(t).observe(many).Err("A"); !errors.As(err, new(*policy.BoundError)) {
		t.Errorf("a chain has more rules than its backend can have: %.300v", err)
	}
}

func TestNoUsableBackend(t *testing.T) {
	f := newFixture(t)
	for _, c := range []netfilter.Choice{netfiltertest.IPTables, netfiltertest.Legacy, netfiltertest.NFTables} {
		f.kernel.Unusable[c] = fmt.Errorf("%s does not work: %w", c, netfilter.ErrUnusable)
	}
	f.kernel.Chains[netfiltertest.IPTables][policy.ChainFamily{Chain: "A", Family: policy.IPv4}] = policy.Chain{Family: policy.IPv4, Name: "A"}
	f.enforcer.AllBackends = true
	v := f.sync(network("podnet", "A"))
	err := v.Err("A")
	if !errors.Is(err, netfilter.ErrUnusable) || !strings.Contains(err.Error(), "nftables does not work") {
		t.Errorf("error %v", err)
	}
	if v.Exists("A") || len(v.Duplicates) > 0 {
		t.Error("no chain exists")
	}
	clear(f.kernel.Unusable)
	f.mustBeInSync(f.sync(network("podnet", "A"))) // which chooses again
}
