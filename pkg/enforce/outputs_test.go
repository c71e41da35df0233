// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestOutputStays: the address in force stays while the list does, after a reboot too. One that left the node is on
// record as a reset, before the other one is written, and only where the rules are.
func TestOutputStays(t *testing.T) {
	f := newFixture(t)
	path := f.enforcer.Dir.Path()
	boot := func(id string) {
		f.enforcer.Dir = store.Open(path).WithBoot("00000000-0000-4000-8000-00000000000" + id)
	}
	var node []string
	f.enforcer.Addresses = func([]policy.Family) (list []policy.NodeAddress, _ error) {
		for _, a := range node {
			list = append(list, policy.NodeAddress{Address: netip.MustParseAddr(a), Interface: "eth0", Up: true})
		}
		return list, nil
	}
	source := func(items ...string) policy.Source {
		return network("podnet", "A", func(s *policy.SourcePolicy) {
			for _, item := range items {
				s.OutputAddresses = append(s.OutputAddresses, netip.MustParsePrefix(item))
			}
		})
	}
	want := func(address string, left ...string) {
		t.Helper()
		s := f.observe(source("192.0.2.0/24"))
		f.mustBeInSync(s)
		if got := s.Chains[0].Policy.Outputs; len(got) != 1 || got[0].Address.String() != address {
			t.Errorf("outputs %v, want %s", got, address)
		}
		var resets []string
		for _, r := range f.record().Resets {
			for _, a := range r.Left {
				resets = append(resets, a.Address.String())
			}
		}
		if !slices.Equal(resets, left) {
			t.Errorf("resets for %v, want %v", resets, left)
		}
	}
	boot("1")
	node = []string{"192.0.2.9"}
	f.sync(source("192.0.2.0/24"))
	want("192.0.2.9")
	node = []string{"192.0.2.1", "192.0.2.9"}
	f.sync(source("192.0.2.0/24"))
	want("192.0.2.9")
	boot("2")
	f.sync(source("192.0.2.0/24"))
	want("192.0.2.9")
	node = []string{"192.0.2.1"}
	f.sync(source("192.0.2.0/24"))
	want("192.0.2.1", "192.0.2.9")
	f.sync(source("192.0.2.0/25")) // another list: what was in force does not count
	f.sync(source("192.0.2.0/24"))
	want("192.0.2.1", "192.0.2.9")
	node = nil
	if s := f.sync(source("192.0.2.0/24")); len(s.NoOutputs()) != 1 || len(s.Chains[0].Policy.Outputs) != 0 {
		t.Errorf("without an address: %+v", s.Chains[0].Policy.Outputs)
	}
}

// TestFormerAddresses: connections that are translated to an address end when it leaves the node, also if it is not in force
// any more, its list or a family of it has gone, or many leave at once; and not before.
func TestFormerAddresses(t *testing.T) {
	f := newFixture(t)
	node := []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "192.0.2.5", "2001:db8::1"}
	f.enforcer.Addresses = func(families []policy.Family) (list []policy.NodeAddress, _ error) {
		for _, a := range node {
			if address := netip.MustParseAddr(a); slices.Contains(families, policy.FamilyOf(address)) {
				list = append(list, policy.NodeAddress{Address: address, Interface: "eth0", Up: true})
			}
		}
		return list, nil
	}
	source := func(chain string, items ...string) policy.Source {
		return network("net"+chain, chain, enableIPv6, func(s *policy.SourcePolicy) {
			for _, item := range items {
				s.OutputAddresses = append(s.OutputAddresses, netip.MustParsePrefix(item))
			}
		})
	}
	all := func(items func(i int) []string) (sources []policy.Source) {
		for i, chain := range []string{"A", "B", "C", "D", "E"} {
			sources = append(sources, source(chain, items(i)...))
		}
		return sources
	}
	wantLeft := func(want ...string) {
		t.Helper()
		var left []string
		for _, r := range f.record().Resets {
			for _, a := range r.Left {
				left = append(left, a.Chain+" "+a.Address.String())
			}
		}
		if !slices.Equal(left, want) {
			t.Errorf("resets for %q, want %q", left, want)
		}
	}
	f.mustBeInSync(f.sync(all(func(i int) []string { return []string{node[i] + "/32", "2001:db8::/64"} })...))
	f.mustBeInSync(f.sync(all(func(int) []string { return []string{"2001:db8::/64"} })...)) // without an item of IPv4
	wantLeft()
	f.mustBeInSync(f.sync(all(func(int) []string { return nil })...)) // without a list
	wantLeft()
	node = node[5:]
	if f.observe(all(func(int) []string { return nil })...).InSync() {
		t.Error("in sync although addresses left the node")
	}
	f.mustBeInSync(f.sync(all(func(int) []string { return nil })...))
	wantLeft("A 192.0.2.1", "B 192.0.2.2", "C 192.0.2.3", "D 192.0.2.4", "E 192.0.2.5")
	f.mustBeInSync(f.observe(all(func(int) []string { return nil })...))
}
