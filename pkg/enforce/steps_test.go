// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"net/netip"
	"reflect"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// fullDisk has room for a record with so many resets.
type fullDisk struct {
	effects
	room, records, warnings int
}

func (d *fullDisk) warn(error) { d.warnings++ }

func (d *fullDisk) record(r store.Record) error {
	if d.records++; len(r.Resets) > d.room {
		return errFault
	}
	return nil
}

// A record for which the disk has no room is written without its new resets, or without any.
func TestRecordWithoutResets(t *testing.T) {
	resets := []store.Reset{{At: 1}, {At: 2}}
	for _, c := range []struct{ resets, room, want, records, warnings int }{
		{2, 2, 2, 1, 0}, {2, 1, 1, 2, 1}, {2, 0, 0, 3, 1}, {2, -1, -1, 3, 0}, {0, -1, -1, 1, 0},
	} {
		s, d := &State{record: store.Record{Resets: resets[:1]}, planned: store.Record{Boot: "this", Resets: resets[:c.resets]}}, &fullDisk{room: c.room}
		s = recordFirst{}.take(t.Context(), d, s)
		if (s.RecordErr != nil) != (c.want < 0) || d.records != c.records || d.warnings != c.warnings {
			t.Errorf("%+v: error %v, %d records, %d warnings", c, s.RecordErr, d.records, d.warnings)
		}
		if c.want >= 0 && (len(s.record.Resets) != c.want || !reflect.DeepEqual(s.planned, s.record)) {
			t.Errorf("%+v: record %+v, planned %+v", c, s.record, s.planned)
		}
	}
}

// storing calls a function before it stores a document.
type storing struct {
	does
	before func()
}

func (e storing) store(src policy.Source) error {
	e.before()
	return e.does.store(src)
}

// A pod that an ADD records before it can see a new list of namespaces is exempt. Without a new one no pods are listed.
func TestPodRecordedBeforeDocumentsAreStored(t *testing.T) {
	address := netip.MustParseAddr("10.88.0.9")
	for _, known := range []bool{false, true} {
		e := &Enforcer{Dir: store.Open(t.TempDir() + "/state"), Drivers: netfiltertest.New().Drivers(), Warn: func(error) {}}
		lock, err := e.Dir.Lock(t.Context())
		if err != nil {
			t.Fatal(err)
		}
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
		s = run(t.Context(), s, storing{does{e, lock}, func() {
			pod := store.Pod{Attachment: store.Attachment{Network: "podnet", ContainerID: "pod", IfName: "eth0"}, Namespace: "prod", Addresses: []netip.Addr{address}}
			if err := e.Dir.Attach(pod); err != nil {
				t.Fatal(err)
			}
		}})
		state, err := e.Dir.Load()
		if err != nil {
			t.Fatal(err)
		}
		if pods := state.Record.Addresses(); len(pods) > 0 == known || s.Err("A") != nil || s.RecordErr != nil {
			t.Errorf("namespaces known %t: exempt are %v, errors %v, %v", known, pods, s.Err("A"), s.RecordErr)
		}
		again := e.Observe(t.Context(), sources, state.Record)
		if again.Differs() || len(again.Chains[0].Policy.ExemptPods) > 0 == known {
			t.Errorf("namespaces known %t: %v", known, again.Diff())
		}
	}
}
