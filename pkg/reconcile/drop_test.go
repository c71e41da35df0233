// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"os"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// observed is a driver that calls a function after each reading of rules.
type observed struct {
	netfilter.Driver
	after func()
}

func (d *observed) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := d.Driver.Open(c)
	return &observedBackend{b, d}, err
}

type observedBackend struct {
	netfilter.Backend
	driver *observed
}

func (b *observedBackend) Observe(ctx context.Context, chains []netfilter.ChainRef) (netfilter.Observation, error) {
	rs, err := b.Backend.Observe(ctx, chains)
	b.driver.after()
	return rs, err
}

// unused makes a network one that nobody names or uses any more.
func (f *fixture) unused(network string) {
	f.Helper()
	path := f.conflist(network, map[string]any{"nonMasqueradeCIDRs": []string{"10.1.0.0/16"}})
	f.right()
	if err := os.Remove(path); err != nil {
		f.Fatal(err)
	}
}

// An ADD that attached before its network's document was gone has found all right,
// and keeps document and rules.
func TestAttachedWhileItsNetworkIsDropped(t *testing.T) {
	f := newFixture(t)
	f.conflist("other", map[string]any{"nonMasqueradeCIDRs": []string{"10.2.0.0/16"}})
	f.unused("podnet")
	f.unused("third")
	f.DropAfter = 0
	attached := 0
	f.Drivers = netfilter.Drivers{&observed{f.Drivers[0], func() {
		if attached == 0 && f.stored(policy.Network, "podnet") == nil { // it was dropped by now
			attached++
			if err := f.Dir.Attach("podnet", "pod1", "eth0"); err != nil {
				t.Error(err)
			}
		}
	}}}
	r := f.right()
	if attached != 1 {
		t.Fatalf("attached %d times", attached)
	}
	if f.stored(policy.Network, "podnet") == nil {
		t.Error("the document is gone")
	}
	if len(r.Dropped) != 1 || r.Dropped[0].Name != "third" || f.stored(policy.Network, "third") != nil {
		t.Errorf("dropped %v, want the third alone", r.Dropped)
	}
	f.exempts("10.1.0.0-10.2.255.255," + linkLocal)
	f.wants(f.pass(), Unchanged)
}
