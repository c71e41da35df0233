// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// fullDisk has room for a record with so many resets.
type fullDisk struct {
	effects
	room, records, warnings int
}

func (d *fullDisk) warn(error) { d.warnings++ }

func (d *fullDisk) PutRecord(r store.Record) error {
	if d.records++; len(r.Resets) > d.room {
		return errFault
	}
	return nil
}

func (d *fullDisk) desireRecorded(*State) {}

func (d *fullDisk) TakeAddresses(map[store.Attachment][]netip.Addr) error { return errFault }

// A change whose record cannot be written fails. A repair does what is on record, says that connections are not reset, and
// fails the chains that are not.
func TestRecordThatCannotBeWritten(t *testing.T) {
	for name, c := range map[string]struct {
		isChange bool
		planned  []store.Reset
		fails    string
		warnings int
	}{
		"change": {true, []store.Reset{{At: 1}, {At: 2}}, "AB", 0},
		"repair": {false, []store.Reset{{At: 1}}, "B", 0},
		"resets": {false, []store.Reset{{At: 1}, {At: 2}}, "B", 1},
	} {
		d := &fullDisk{room: -1}
		s := &State{Chains: []Chain{
			{Policy: policy.Policy{Chain: "A"}, Diff: policy.Diff{{Chain: "A"}}, Recorded: true},
			{Policy: policy.Policy{Chain: "B"}, Diff: policy.Diff{{Chain: "B"}}},
		}}
		if c.isChange {
			s.documents.before = []policy.Source{}
		}
		s.onRecord.now = store.Record{Resets: []store.Reset{{At: 1}}}
		s.onRecord.planned = store.Record{Boot: "this", Resets: c.planned}
		s = recordFirst(t.Context(), d, s)
		fails := ""
		for i := range s.Chains {
			if errors.Is(s.Chains[i].Err, errFault) {
				fails += s.Chains[i].Policy.Chain
			}
		}
		if fails != c.fails || d.warnings != c.warnings || s.RecordErr == nil || s.progress.keepsToRecord == c.isChange {
			t.Errorf("%s: chains %s fail, %d warnings, error %v", name, fails, d.warnings, s.RecordErr)
		}
		if isOver := s.isOnRecord(); isOver == c.isChange {
			t.Errorf("%s: what is planned is on record: %t", name, isOver)
		}
	}
}

// What is recorded last is only warned about: the record has more than there is.
func TestWarningsOfAFullDisk(t *testing.T) {
	d := &fullDisk{room: -1}
	s := &State{
		node:     node{exempt: exemption{taken: map[store.Attachment][]netip.Addr{{}: nil}}},
		onRecord: onRecord{planned: store.Record{Boot: "this"}},
	}
	s.Guard.readings = enoughReadings
	s = takeAddresses(t.Context(), d, s)
	s = recordLast(t.Context(), d, s)
	if d.warnings != 2 || s.next() != nil {
		t.Errorf("%d warnings, %+v", d.warnings, s)
	}
}

// The first failure of a chain, or of the guards, is the one that is told.
func TestFirstFailure(t *testing.T) {
	first, other := errors.New("first"), errors.New("other")
	var c Chain
	var g GuardState
	for _, err := range []error{nil, first, other, nil} {
		c.fail(err)
		if err != nil {
			g.failWrite(err)
		}
	}
	if !errors.Is(c.Err, first) || !errors.Is(c.failed, first) || !errors.Is(g.Err, first) || !errors.Is(g.failed, first) {
		t.Errorf("%v, %v, %v, %v", c.Err, c.failed, g.Err, g.failed)
	}
}

// A guard is in force if nothing differs that concerns it. A chain is wrong with its guard, and with tables that cannot be read or
// belong to others.
func TestGuardInForce(t *testing.T) {
	a := policy.ChainFamily{Chain: "A", Family: policy.IPv4}
	desired := []policy.Guard{{Chain: "A", Family: policy.IPv6}, {Chain: "A", Family: policy.IPv4}}
	differs := func(chain string) policy.Diff { return policy.Diff{{Chain: chain, Family: policy.IPv4}} }
	for name, c := range map[string]struct {
		g       GuardState
		inForce bool
		wrong   string
	}{
		"right":                              {GuardState{}, true, ""},
		"it differs":                         {GuardState{Diff: differs("A")}, false, "A"},
		"another differs":                    {GuardState{Diff: differs("B")}, true, "B"},
		"the table differs":                  {GuardState{Diff: differs("")}, false, "AB"},
		"it is inactive":                     {GuardState{Inactive: []Inactive{{ChainFamily: a}}}, false, ""},
		"unreadable":                         {GuardState{Err: errFault}, false, "A"},
		"of others":                          {GuardState{Err: errFault, others: true}, false, "AB"},
		"another one that cannot be written": {GuardState{Err: errFault, Diff: differs("B")}, false, "AB"},
		"a table that cannot be written":     {GuardState{Err: errFault, Diff: differs("")}, false, "AB"},
	} {
		c.g.Desired = desired
		if g := c.g.Of(a); (g != nil) != c.inForce || g != nil && g.Family != a.Family {
			t.Errorf("%s: in force is %v", name, g)
		}
		for _, chain := range []string{"A", "B"} {
			if err := c.g.err(chain); (err != nil) != strings.Contains(c.wrong, chain) || err != nil && errors.Is(err, errFault) != (c.g.Err != nil) {
				t.Errorf("%s: error of %s: %v", name, chain, err)
			}
		}
	}
}

// Resets wait ten seconds after a walk that looked for untranslated connections, as do those of a walk that failed.
func TestDueResets(t *testing.T) {
	now := store.BootTime()
	before := []policy.Source{{}}
	for name, c := range map[string]struct {
		r    store.Reset
		last int64
		due  bool
	}{
		"the first":             {store.Reset{At: 1}, 0, true},
		"untranslated":          {store.Reset{At: now}, now, false},
		"before others":         {store.Reset{At: now, Before: before}, now, true},
		"of a walk that failed": {store.Reset{At: now - 1, Before: before}, now, false},
		"failed before a boot":  {store.Reset{At: -1, Before: before}, 0, true},
		"after a while":         {store.Reset{At: 1}, now - int64(resetInterval), true},
	} {
		due, next := dueResets(store.Record{Resets: []store.Reset{c.r}, LastReset: c.last})
		if len(due) > 0 != c.due || next > 0 == c.due {
			t.Errorf("%s: due %v, next in %s", name, due, next)
		}
	}
}

// A walk that failed, or that looked for untranslated connections, is the last one. Nothing is recorded for chains that are gone.
func TestRecordWalk(t *testing.T) {
	e := &Enforcer{Dir: store.Open(t.TempDir() + "/state")}
	untranslated, before := store.Reset{At: 1}, store.Reset{At: 2, Before: []policy.Source{}}
	for name, c := range map[string]struct {
		due    []store.Reset
		began  int64
		failed error
		last   int64
		left   int
	}{
		"untranslated":       {[]store.Reset{untranslated}, 7, nil, 7, 1},
		"before others":      {[]store.Reset{before}, 7, nil, 3, 1},
		"nothing to look at": {[]store.Reset{untranslated}, 0, nil, 3, 1},
		"fails":              {[]store.Reset{before}, 7, errFault, 7, 2},
		"lost meanwhile":     {[]store.Reset{before}, 7, errFault, 0, 0},
	} {
		rec := store.Record{Boot: e.Dir.Boot(), Resets: []store.Reset{untranslated, before}, LastReset: 3}
		if name == "lost meanwhile" {
			rec = store.Record{}
		}
		lock, err := e.Dir.Lock(t.Context())
		assert.NoError(t, err)
		err = errors.Join(lock.PutRecord(rec), lock.Release())
		err = errors.Join(err, e.recordWalk(t.Context(), &walk{due: c.due, began: c.began}, nil, c.failed))
		s, loadErr := e.Dir.Load()
		if err := errors.Join(err, loadErr); err != nil || s.Record.LastReset != c.last || len(s.Record.Resets) != c.left {
			t.Errorf("%s: %v, record %+v", name, err, s.Record)
		}
	}
}

// A chain that was removed is not in its tables any more. Others of its name are, and so is it in an earlier State.
func TestForget(t *testing.T) {
	a, a6, b := policy.Chain{Name: "A", Family: policy.IPv4}, policy.Chain{Name: "A", Family: policy.IPv6}, policy.Chain{Name: "B", Family: policy.IPv4}
	in := func(c netfilter.Choice) (t tables) {
		t.choice, t.observation.Rules.Chains = c, []policy.Chain{a, a6, b}
		return t
	}
	before := &State{observed: observed{tables: []tables{in(netfiltertest.IPTables), in(netfiltertest.NFTables)}}}
	s := before.clone()
	s.forget(store.OwnedChain{Chain: "A", Family: policy.IPv4, Backend: policy.NFTables})
	for _, c := range []struct {
		s    *State
		want []int
	}{{before, []int{3, 3}}, {s, []int{3, 2}}} {
		for i, n := range c.want {
			if left := c.s.observed.tables[i].observation.Rules.Chains; len(left) != n || left[n-1].Name != "B" || left[n-2].Family != policy.IPv6 {
				t.Errorf("left are %v, want %d", left, n)
			}
		}
	}
}

// storing calls a function before it stores a document.
type storing struct {
	does
	before func()
}

func (e storing) Put(src policy.Source) error {
	e.before()
	return e.does.Put(src)
}

// A pod that an ADD records before it can see a new list of namespaces is exempt. Without a new one no pods are listed.
func TestPodRecordedBeforeDocumentsAreStored(t *testing.T) {
	address := netip.MustParseAddr("10.88.0.9")
	for _, known := range []bool{false, true} {
		e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: netfiltertest.New().Drivers(), Warn: func(error) {}}
		lock := assert.Must(e.Dir.Lock(t.Context()))(t)
		defer func() { _ = lock.Release() }()
		sources := []policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
			Chain: "A", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16")}, Guard: policy.GuardDrop, NonMasqueradeNamespaces: []string{"prod"},
		}}}
		p, rec := &Proposal{Sources: sources, Changed: sources}, store.Record{Boot: e.Dir.Boot()}
		if known {
			rec.Namespaces = []string{"prod"}
		}
		s := e.ObserveProposal(t.Context(), p, rec)
		s.changes(nil, p)
		s.begin(1)
		s = takeSteps(t.Context(), s, storing{does{e, lock}, func() {
			pod := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod", IfName: "eth0"}, Namespace: "prod", Addresses: []netip.Addr{address}}
			assert.NoError(t, e.Dir.Attach(pod))
		}})
		state := assert.Must(e.Dir.Load())(t)
		if pods := state.Record.Addresses(); len(pods) > 0 == known || s.Err("A") != nil || s.RecordErr != nil {
			t.Errorf("namespaces known %t: exempt are %v, errors %v, %v", known, pods, s.Err("A"), s.RecordErr)
		}
		again := e.Observe(t.Context(), sources, state.Record)
		if again.Differs() || len(again.Chains[0].Policy.ExemptPods) > 0 == known {
			t.Errorf("namespaces known %t: %v", known, again.Diff())
		}
	}
}

// recordless cannot write the record.
type recordless struct{ does }

func (recordless) PutRecord(store.Record) error { return errFault }

// TestRepairWithoutRecord: rules that another program removed are repaired although the record of another exempt pod cannot be
// written. Its addresses are exempt when that can be.
func TestRepairWithoutRecord(t *testing.T) {
	kernel := netfiltertest.New()
	e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: kernel.Drivers(), Warn: func(error) {}, RereadAll: true}
	lock := assert.Must(e.Dir.Lock(t.Context()))(t)
	defer func() { _ = lock.Release() }()
	sources := []policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
		Chain: "A", Backend: policy.NFTables, NonMasqueradeNamespaces: []string{"prod"},
	}}}
	attach := func(container, address string) {
		assert.NoError(t, e.Dir.Attach(store.Pod{
			Attachment: store.Attachment{Network: "podnet", ContainerID: container, IfName: "eth0"},
			Namespace:  "prod", Addresses: []netip.Addr{netip.MustParseAddr(address)},
		}))
	}
	observe := func() *State {
		return e.Observe(t.Context(), sources, assert.Must(e.Dir.Load())(t).Record)
	}
	attach("one", "10.88.0.1")
	if s := e.Sync(t.Context(), observe(), lock); !s.InSync() {
		t.Fatalf("%v, %v", s.Diff(), s.RecordErr)
	}
	attach("two", "10.88.0.2")
	for ref := range kernel.Chains[netfiltertest.NFTables] {
		delete(kernel.Chains[netfiltertest.NFTables], ref)
	}
	kernel.Changed()
	s := observe()
	s.begin(1)
	s = takeSteps(t.Context(), s, recordless{does{e, lock}})
	if !errors.Is(s.RecordErr, errFault) || s.Err("A") != nil {
		t.Errorf("record: %v, chain: %v", s.RecordErr, s.Err("A"))
	}
	if s.PodsRecorded() || s.InSync() {
		t.Error("the second pod counts as recorded")
	}
	exempt := func(want string) {
		t.Helper()
		rules := kernel.Chains[netfiltertest.NFTables][policy.ChainFamily{Chain: "A", Family: policy.IPv4}].Rules
		if len(rules) < 2 || rules[0].From.String() != want {
			t.Errorf("exempt are %v, want %s", rules, want)
		}
	}
	exempt("10.88.0.1/32")
	if s := e.Sync(t.Context(), observe(), lock); !s.InSync() {
		t.Errorf("%v, %v", s.Diff(), s.RecordErr)
	}
	exempt("10.88.0.1-10.88.0.2")
}

// TestNoRepairWithoutRecordBesideALostDocument: the rules that exist come from a document that cannot be read,
// too, and stay as they are while the record cannot be written.
func TestNoRepairWithoutRecordBesideALostDocument(t *testing.T) {
	kernel := netfiltertest.New()
	e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: kernel.Drivers(), Warn: func(error) {}, RereadAll: true}
	lock := assert.Must(e.Dir.Lock(t.Context()))(t)
	defer func() { _ = lock.Release() }()
	sources := []policy.Source{
		{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
			Chain: "A", Backend: policy.NFTables, NonMasqueradeNamespaces: []string{"prod"},
		}},
		{ID: policy.SourceID{Kind: policy.Network, Name: "lost"}, Policy: policy.SourcePolicy{
			Chain: "A", NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
		}},
	}
	record := func() store.Record { return assert.Must(e.Dir.Load())(t).Record }
	if s := e.Sync(t.Context(), e.Observe(t.Context(), sources, record()), lock); !s.InSync() {
		t.Fatalf("%v, %v", s.Diff(), s.RecordErr)
	}
	assert.NoError(t, e.Dir.Attach(store.Pod{
		Attachment: store.Attachment{Network: "podnet", ContainerID: "one", IfName: "eth0"},
		Namespace:  "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.1")},
	}))
	s := e.Observe(t.Context(), sources[:1], record())
	s.keepWhatExists(nil)
	s.begin(1)
	before := kernel.Generation
	s = takeSteps(t.Context(), s, recordless{does{e, lock}})
	if !errors.Is(s.RecordErr, errFault) {
		t.Errorf("record: %v", s.RecordErr)
	}
	assert.Equal(t, "generation", kernel.Generation, before)
}

// TestNoRepairWithoutRecordOfAnotherList: the pods on record are those of the former list of namespaces, so rules with them
// and the prefixes of the stored policy would be those of no policy.
func TestNoRepairWithoutRecordOfAnotherList(t *testing.T) {
	kernel := netfiltertest.New()
	e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: kernel.Drivers(), Warn: func(error) {}, RereadAll: true}
	lock := assert.Must(e.Dir.Lock(t.Context()))(t)
	defer func() { _ = lock.Release() }()
	source := policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
		Chain: "A", Backend: policy.NFTables, NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")},
	}}
	record := func() store.Record { return assert.Must(e.Dir.Load())(t).Record }
	if s := e.Sync(t.Context(), e.Observe(t.Context(), []policy.Source{source}, record()), lock); !s.InSync() {
		t.Fatalf("%v, %v", s.Diff(), s.RecordErr)
	}
	assert.NoError(t, e.Dir.Attach(store.Pod{
		Attachment: store.Attachment{Network: "podnet", ContainerID: "one", IfName: "eth0"},
		Namespace:  "prod", Addresses: []netip.Addr{netip.MustParseAddr("10.88.0.1")},
	}))
	source.Policy.NonMasqueradeCIDRs = nil // stored by a process that was killed
	source.Policy.NonMasqueradeNamespaces = []string{"prod"}
	s := e.Observe(t.Context(), []policy.Source{source}, record())
	s.begin(1)
	before := kernel.Generation
	s = takeSteps(t.Context(), s, recordless{does{e, lock}})
	if !errors.Is(s.RecordErr, errFault) {
		t.Errorf("record: %v", s.RecordErr)
	}
	assert.Equal(t, "generation", kernel.Generation, before)
}

// TestNoRepairWithoutRecordOfOtherOutputs: a process that was killed recorded the addresses of another list of outputAddresses
// than that of the stored policy. Rules with them and the stored prefixes would be those of no policy.
func TestNoRepairWithoutRecordOfOtherOutputs(t *testing.T) {
	kernel := netfiltertest.New()
	e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: kernel.Drivers(), Warn: func(error) {}}
	address := policy.NodeAddress{Address: netip.MustParseAddr("203.0.113.9"), Interface: "eth0", Up: true}
	e.Addresses = func([]policy.Family) ([]policy.NodeAddress, error) { return []policy.NodeAddress{address}, nil }
	lock := assert.Must(e.Dir.Lock(t.Context()))(t)
	defer func() { _ = lock.Release() }()
	sources := []policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
		Chain: "A", Backend: policy.NFTables,
	}}}
	record := func() store.Record { return assert.Must(e.Dir.Load())(t).Record }
	if s := e.Sync(t.Context(), e.Observe(t.Context(), sources, record()), lock); !s.InSync() {
		t.Fatalf("%v, %v", s.Diff(), s.RecordErr)
	}
	changed := record()
	changed.Outputs = []store.Outputs{{
		Chain: "A", Items: policy.AddressItems{netip.MustParsePrefix("203.0.113.0/24")},
		Addresses: []policy.OutputAddress{{Interface: address.Interface, Address: address.Address}},
	}}
	assert.NoError(t, lock.PutRecord(changed))
	s := e.Observe(t.Context(), sources, record())
	s.begin(1)
	before := kernel.Generation
	s = takeSteps(t.Context(), s, recordless{does{e, lock}})
	if !errors.Is(s.RecordErr, errFault) {
		t.Errorf("record: %v", s.RecordErr)
	}
	assert.Equal(t, "generation", kernel.Generation, before)
}
