// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
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
	node = []string{"198.51.100.1"}
	if s := f.sync(source("192.0.2.0/24")); len(s.NoOutputs()) != 1 || len(s.Chains[0].Policy.Outputs) != 0 {
		t.Errorf("without an address: %+v", s.Chains[0].Policy.Outputs)
	}
}

// TestNoAddressOfAFamily: items of a family of which the node has no address but those of pods are no mistake.
func TestNoAddressOfAFamily(t *testing.T) {
	for name, c := range map[string]struct {
		node              []policy.NodeAddress
		mistakes, notices string
	}{
		"both families":           {[]policy.NodeAddress{up("192.0.2.1", "eth0"), up("2001:db8::1", "eth0")}, "", ""},
		"no IPv4":                 {[]policy.NodeAddress{up("2001:db8::1", "eth0")}, "", "A ipv4"},
		"IPv4 of pods":            {[]policy.NodeAddress{up("2001:db8::1", "eth0"), up("10.1.0.1", "cni0"), up("10.2.0.1", "cni1")}, "", "A ipv4"},
		"IPv4 of Services":        {[]policy.NodeAddress{up("2001:db8::1", "eth0"), up("10.96.0.1", policy.ServiceInterface)}, "", "A ipv4"},
		"IPv4 of a link":          {[]policy.NodeAddress{up("2001:db8::1", "eth0"), up("169.254.20.10", "nodelocaldns")}, "", "A ipv4"},
		"another IPv4 address":    {[]policy.NodeAddress{up("2001:db8::1", "eth0"), up("198.51.100.1", "eth0")}, "A ipv4", ""},
		"an address that is down": {[]policy.NodeAddress{up("2001:db8::1", "eth0"), {Address: netip.MustParseAddr("192.0.2.1"), Interface: "eth1"}}, "A ipv4", ""},
		"none":                    {nil, "", "A ipv4, A ipv6"},
	} {
		f := newFixture(t)
		f.enforcer.Addresses = func([]policy.Family) ([]policy.NodeAddress, error) { return c.node, nil }
		s := f.observe(
			network("one", "A", func(s *policy.SourcePolicy) {
				s.EnableIPv6, s.PodCIDRs = new(true), []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
				s.OutputAddresses = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
			}),
			network("two", "B", func(s *policy.SourcePolicy) { s.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.2.0.0/16")} }))
		if mistakes, notices := chainsOf(s.NoOutputs()), chainsOf(s.NoAddresses()); mistakes != c.mistakes || notices != c.notices {
			t.Errorf("%s: mistakes %q, notices %q; want %q, %q", name, mistakes, notices, c.mistakes, c.notices)
		}
	}
}

func up(address, on string) policy.NodeAddress {
	return policy.NodeAddress{Address: netip.MustParseAddr(address), Interface: on, Up: true}
}

func chainsOf(list []enforce.Inactive) string {
	var chains []string
	for _, i := range list {
		chains = append(chains, i.Chain+" "+string(i.Family))
	}
	return strings.Join(chains, ", ")
}

// TestOutputsOfAFailedRun: the record has the addresses that are in force, whatever cannot be written or read. None has left
// the node because the addresses cannot be read.
func TestOutputsOfAFailedRun(t *testing.T) {
	f := newFixture(t)
	var node []string
	device, unreadable := "eth0", error(nil)
	f.enforcer.Addresses = func([]policy.Family) (list []policy.NodeAddress, _ error) {
		for _, a := range node {
			list = append(list, policy.NodeAddress{Address: netip.MustParseAddr(a), Interface: device, Up: true})
		}
		return list, unreadable
	}
	source := func(chain string, b policy.Backend, item string) policy.Source {
		return network("net"+chain, chain, backend(b), func(s *policy.SourcePolicy) { s.OutputAddresses = prefixes(item) })
	}
	a, b := source("A", policy.IPTables, "192.0.2.0/24"), source("B", policy.NFTables, "192.0.2.0/24")
	want := func(step, inA, inB string) {
		t.Helper()
		got := map[string]string{}
		rec := f.record()
		for _, o := range rec.Outputs {
			got[o.Chain] = o.Addresses[0].Address.String()
		}
		if got["A"] != inA || got["B"] != inB || len(rec.Outputs) != 2 {
			t.Errorf("%s: the record has %v, want %s and %s", step, got, inA, inB)
		}
	}
	noDrift := func(step string) {
		t.Helper()
		if s := f.observe(a, b); s.InSync() || len(s.Drift()) > 0 {
			t.Errorf("%s: in sync %t, drift %v", step, s.InSync(), s.Drift())
		}
	}
	node = []string{"192.0.2.9"}
	f.mustBeInSync(f.sync(a))
	node = []string{"192.0.2.1", "192.0.2.9"}
	f.mustBeInSync(f.sync(a, b))
	want("another chain with the list", "192.0.2.9", "192.0.2.1")

	node, unreadable = nil, errRefused
	if s := f.sync(a, b); !errors.Is(s.Err("A"), errRefused) {
		t.Errorf("error %v", s.Err("A"))
	}
	want("unreadable addresses", "192.0.2.9", "192.0.2.1")
	if rec := f.record(); len(rec.Resets)+len(rec.Former) > 0 {
		t.Errorf("unreadable addresses: resets %v, former %v", rec.Resets, rec.Former)
	}

	node, unreadable = []string{"192.0.2.3"}, nil
	noDrift("another address")
	f.kernel.fail = map[string]error{writeRules: errRefused}
	f.sync(a, b)
	want("a write that fails", "192.0.2.9", "192.0.2.3")
	f.kernel.fail = nil
	f.mustBeInSync(f.sync(a, b))
	want("a write", "192.0.2.3", "192.0.2.3")
	device = "eth1"
	noDrift("another interface")
	f.mustBeInSync(f.sync(a, b))

	node = []string{"192.0.2.1", "192.0.2.3"}
	f.mustBeInSync(f.sync(source("A", policy.IPTables, "192.0.2.0/25"), b))
	want("another list", "192.0.2.1", "192.0.2.3")
	f.putRecord(func(r *store.Record) { r.Outputs = r.Outputs[1:] })
	if f.observe(source("A", policy.IPTables, "192.0.2.0/25"), b).InSync() {
		t.Error("in sync without the address on record")
	}
}
