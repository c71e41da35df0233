// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// made returns what the record says was made, and sites which tables stand.
func (f *fixture) made() (all []string) {
	f.Helper()
	for _, m := range f.record().Made {
		all = append(all, fmt.Sprint(m.Family, " ", m.Backend, " ", m.Variant, " ", m.Site))
	}
	return all
}

func (f *fixture) sites() (all []policy.Family) {
	for _, family := range policy.Families() {
		if f.kernel.sites[iptChoice][family] {
			all = append(all, family)
		}
	}
	return all
}

func (f *fixture) removeAll(chains ...string) error {
	f.Helper()
	lock, err := f.enforcer.Dir.Lock(context.Background())
	if err != nil {
		f.Fatal(err)
	}
	defer func() {
		if err := lock.Release(); err != nil {
			f.Error(err)
		}
	}()
	_, err = f.enforcer.RemoveAll(context.Background(), chains, f.record(), lock)
	return err
}

func (f *fixture) expect(step string, made []string, sites []policy.Family) {
	f.Helper()
	if diff := cmp.Diff(made, f.made()); diff != "" {
		f.Errorf("%s: on record (-want +got):\n%s", step, diff)
	}
	if diff := cmp.Diff(sites, f.sites()); diff != "" {
		f.Errorf("%s: tables (-want +got):\n%s", step, diff)
	}
}

func TestWhatWasMadeGoesWithTheLastChain(t *testing.T) {
	const four, six = "ipv4 iptables nft table", "ipv6 iptables nft table"
	both := policy.Families()
	f := newFixture(t)
	f.mustBeRight(f.ensure(network("podnet", "A")))
	f.expect("made", []string{four}, both[:1])
	f.mustBeRight(f.ensure(network("podnet", "A", enableIPv6)))
	f.expect("with IPv6", []string{four, six}, both)
	f.mustBeRight(f.ensure(network("podnet", "B", enableIPv6)))
	f.expect("another chain", []string{four, six}, both)
	f.mustBeRight(f.ensure(network("podnet", "B")))
	f.expect("without IPv6", []string{four}, both[:1])
	f.mustBeRight(f.ensure(network("podnet", "B", backend(policy.NFTables))))
	f.expect("another backend", nil, nil)
	f.mustBeRight(f.ensure(network("podnet", "B", backend(policy.IPTables), enableIPv6)))
	f.expect("back again", []string{four, six}, both)
	if err := f.removeAll("B"); err != nil {
		t.Fatal(err)
	}
	f.expect("removed", []string{four, six}, nil) // the record goes with the dataDir
	if len(f.warnings) > 0 {
		t.Errorf("warnings %q", f.warnings)
	}
}

func TestWhatWasThereStays(t *testing.T) {
	f := newFixture(t)
	f.kernel.sites[iptChoice][policy.IPv4] = true
	f.mustBeRight(f.ensure(network("podnet", "A", enableIPv6)))
	f.expect("made", []string{"ipv6 iptables nft table"}, policy.Families())
	if err := f.removeAll("A"); err != nil {
		t.Fatal(err)
	}
	f.expect("removed", []string{"ipv6 iptables nft table"}, policy.Families()[:1])
}

func TestWhatWasMadeAgainIsOurs(t *testing.T) {
	f := newFixture(t)
	f.kernel.sites[iptChoice][policy.IPv4] = true
	f.mustBeRight(f.ensure(network("podnet", "A")))
	delete(f.kernel.sites[iptChoice], policy.IPv4)
	clear(f.kernel.chains[iptChoice])
	f.mustBeRight(f.ensure(network("podnet", "A")))
	f.expect("made again", []string{"ipv4 iptables nft table"}, policy.Families()[:1])
}

func TestWhatCannotBeVacatedFailsNobody(t *testing.T) {
	f := newFixture(t)
	f.mustBeRight(f.ensure(network("podnet", "A")))
	f.kernel.noVacate[iptChoice] = errors.New("no permission")
	next := network("podnet", "A", backend(policy.NFTables))
	f.mustBeRight(f.ensure(next))
	if len(f.warnings) != 1 || !strings.Contains(f.warnings[0], "leave iptables (nft) as it was: no permission") {
		t.Errorf("warnings %q", f.warnings)
	}
	f.expect("failed", []string{"ipv4 iptables nft table"}, policy.Families()[:1])
	f.mustBeRight(f.look(next)) // and no ADD tries again
	if err := f.removeAll("A"); err == nil {
		t.Error("RemoveAll does not tell")
	}
	delete(f.kernel.noVacate, iptChoice)
	if err := f.removeAll("A"); err != nil {
		t.Fatal(err)
	}
	f.expect("later", []string{"ipv4 iptables nft table"}, nil)
}

func TestWhatAnEarlierBootMadeIsForgotten(t *testing.T) {
	f := newFixture(t)
	path := f.enforcer.Dir.Path()
	f.enforcer.Dir = store.Open(path, store.WithBoot("one"))
	f.mustBeRight(f.ensure(network("podnet", "A")))
	clear(f.kernel.chains[iptChoice]) // and others made the table meanwhile
	f.enforcer.Dir = store.Open(path, store.WithBoot("two"))
	f.mustBeRight(f.ensure(network("podnet", "A")))
	f.expect("rebooted", nil, policy.Families()[:1])
}
