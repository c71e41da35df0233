// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nodeAddress reads "ADDRESS INTERFACE [WORD...]", of an address that could be chosen unless a word says otherwise.
func nodeAddress(t testing.TB, text string) policy.NodeAddress {
	t.Helper()
	words := strings.Fields(text)
	a := policy.NodeAddress{Address: netip.MustParseAddr(words[0]), Interface: words[1], Shared: words[1] == "lo", Up: true}
	for _, w := range words[2:] {
		switch w {
		case "dummy":
			a.Shared = true
		case "down":
			a.Up = false
		case "tentative":
			a.Unusable = true
		case "deprecated":
			a.Deprecated = true
		case "secondary":
			a.Secondary = true
		default:
			t.Fatalf("unknown word %s", w)
		}
	}
	return a
}

func TestOutputAddressesOf(t *testing.T) {
	for name, tt := range map[string]struct {
		items, node, out, inForce string
		want                      string
	}{
		"each interface":              {items: "192.0.2.0/24 198.51.100.0/24", node: "192.0.2.7 eth0; 198.51.100.7 eth1", want: "eth0 192.0.2.7, eth1 198.51.100.7"},
		"the first item":              {items: "198.51.100.0/24 192.0.2.0/24", node: "192.0.2.7 eth0; 198.51.100.7 eth0", want: "eth0 198.51.100.7"},
		"a single address":            {items: "192.0.2.9/32", node: "192.0.2.7 eth0; 192.0.2.9 eth0 secondary", want: "eth0 192.0.2.9"},
		"none":                        {items: "203.0.113.0/24", node: "192.0.2.7 eth0"},
		"no list":                     {node: "192.0.2.7 eth0"},
		"one on lo":                   {items: "203.0.113.5/32", node: "192.0.2.7 eth0; 203.0.113.5 lo", want: "* 203.0.113.5"},
		"one on a dummy interface":    {items: "203.0.113.0/24 192.0.2.0/24", node: "192.0.2.7 eth0; 203.0.113.5 d0 dummy", want: "* 203.0.113.5"},
		"lo is a later item":          {items: "192.0.2.0/24 203.0.113.0/24", node: "192.0.2.7 eth0; 198.51.100.1 eth1; 203.0.113.5 lo", want: "eth0 192.0.2.7, * 203.0.113.5"},
		"lo and interface in an item": {items: "192.0.2.0/24", node: "192.0.2.9 eth0; 192.0.2.7 lo", want: "* 192.0.2.7"},
		"primary before secondary":    {items: "192.0.2.0/24", node: "192.0.2.1 eth0 secondary; 192.0.2.9 eth0", want: "eth0 192.0.2.9 (192.0.2.1)"},
		"the lowest":                  {items: "192.0.2.0/24", node: "192.0.2.9 eth0; 192.0.2.10 eth0", want: "eth0 192.0.2.9 (192.0.2.10)"},
		"the one in force":            {items: "192.0.2.0/24", node: "192.0.2.9 eth0; 192.0.2.10 eth0 secondary", inForce: "eth0 192.0.2.10", want: "eth0 192.0.2.10 (192.0.2.9)"},
		"in force elsewhere":          {items: "192.0.2.0/24", node: "192.0.2.9 eth0; 192.0.2.10 eth0", inForce: "eth1 192.0.2.10", want: "eth0 192.0.2.9 (192.0.2.10)"},
		"in force, and gone":          {items: "192.0.2.0/24", node: "192.0.2.9 eth0", inForce: "eth0 192.0.2.10", want: "eth0 192.0.2.9"},
		"in force, of a later item":   {items: "192.0.2.0/24 198.51.100.0/24", node: "192.0.2.9 eth0; 198.51.100.1 eth0", inForce: "eth0 198.51.100.1", want: "eth0 192.0.2.9"},
		"in force for others":         {items: "203.0.113.0/24", node: "203.0.113.5 lo; 203.0.113.6 lo", inForce: "* 203.0.113.6", want: "* 203.0.113.6 (203.0.113.5)"},
		"in force, of both families": {items: "192.0.2.0/24 2001:db8::/64", node: "192.0.2.9 eth0; 192.0.2.5 eth0; 2001:db8::9 eth0; 2001:db8::5 eth0",
			inForce: "eth0 192.0.2.9; eth0 2001:db8::9", want: "eth0 192.0.2.9 (192.0.2.5), eth0 2001:db8::9 (2001:db8::5)"},
		"in force for others, of both": {items: "192.0.2.0/24 2001:db8::/64", node: "192.0.2.9 lo; 192.0.2.5 lo; 2001:db8::9 lo; 2001:db8::5 lo",
			inForce: "* 192.0.2.9; * 2001:db8::9", want: "* 192.0.2.9 (192.0.2.5), * 2001:db8::9 (2001:db8::5)"},
		"addresses of Services": {items: "192.0.2.0/24", node: "192.0.2.1 kube-ipvs0 dummy; 192.0.2.7 eth0", want: "eth0 192.0.2.7"},
		"only Services":         {items: "192.0.2.0/24", node: "192.0.2.1 kube-ipvs0 dummy"},
		"down":                  {items: "192.0.2.0/24", node: "192.0.2.7 eth0 down"},
		"tentative":             {items: "2001:db8::/32", node: "2001:db8::1 eth0 tentative; 2001:db8::2 eth0", want: "eth0 2001:db8::2"},
		"deprecated":            {items: "2001:db8::/32", node: "2001:db8::1 eth0 deprecated"},
		"deprecated and named":  {items: "2001:db8::1/128", node: "2001:db8::1 eth0 deprecated", want: "eth0 2001:db8::1"},
		"the pods' bridge":      {items: "0.0.0.0/0", node: "10.244.1.1 cni0; 192.0.2.2 cni0 secondary; 192.0.2.7 eth0", want: "eth0 192.0.2.7"},
		"on two interfaces":     {items: "192.0.2.0/24", node: "192.0.2.7 eth0; 192.0.2.7 eth1", want: "eth0 192.0.2.7, eth1 192.0.2.7"},
		"out of scope":          {items: "192.0.2.0/24", node: "192.0.2.7 eth0; 192.0.2.8 wg0", out: "wg+", want: "wg0 192.0.2.8"},
		"both families":         {items: "192.0.2.0/24 2001:db8::/32", node: "192.0.2.7 eth0; 2001:db8::7 eth1", want: "eth0 192.0.2.7, eth1 2001:db8::7"},
	} {
		t.Run(name, func(t *testing.T) {
			p := policy.Policy{PodPrefixes: cidrs("10.244.0.0/16", "fd00:244::/64")}
			for _, item := range strings.Fields(tt.items) {
				p.OutputAddresses.Value = append(p.OutputAddresses.Value, netip.MustParsePrefix(item))
			}
			p.Interfaces.Value = strings.Fields(tt.out)
			var node []policy.NodeAddress
			for text := range strings.SplitSeq(tt.node, "; ") {
				node = append(node, nodeAddress(t, text))
			}
			var inForce []policy.OutputAddress
			for text := range strings.SplitSeq(tt.inForce, "; ") {
				if words := strings.Fields(text); len(words) > 0 {
					inForce = append(inForce, policy.OutputAddress{Interface: strings.Trim(words[0], "*"), Address: netip.MustParseAddr(words[1])})
				}
			}
			var got []string
			for _, f := range policy.Families() {
				for _, o := range p.OutputAddressesOf(f, node, inForce) {
					text := strings.TrimPrefix(o.Interface+" "+o.Address.String(), " ")
					if o.Interface == "" {
						text = "* " + text
					}
					if len(o.Others) > 0 {
						text += fmt.Sprintf(" (%s)", strings.Trim(fmt.Sprint(o.Others), "[]"))
					}
					got = append(got, text)
					if !o.Item.Contains(o.Address) || !slices.Contains(p.OutputAddresses.Value, o.Item) {
						t.Errorf("%s is not in item %s", o.Address, o.Item)
					}
				}
			}
			assert.Equal(t, "addresses", strings.Join(got, ", "), tt.want)
		})
	}
}

// TestConcerned: an address is concerned if its interface has one in an item; those of Services never are.
func TestConcerned(t *testing.T) {
	var node []policy.NodeAddress
	for _, text := range []string{"192.0.2.7 eth0", "198.51.100.7 eth0", "198.51.100.8 eth1", "192.0.2.1 kube-ipvs0 dummy"} {
		node = append(node, nodeAddress(t, text))
	}
	items := policy.AddressItems(cidrs("192.0.2.0/24"))
	assert.Equal(t, "concerned", fmt.Sprint(items.Concerned(node)), fmt.Sprint(node[:2]))
}

// TestMaxAddressItems: a list that is too long names its key and the limit.
func TestMaxAddressItems(t *testing.T) {
	var s policy.SourcePolicy
	s.Chain = "A"
	for i := range policy.MaxAddressItems + 1 {
		s.OutputAddresses = append(s.OutputAddresses, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 32))
	}
	assert.ErrorContains(t, s.Validate(policy.DefaultCIDRLimit), "outputAddresses: has 65 entries")
	s.OutputAddresses = s.OutputAddresses[1:]
	if err := s.Validate(policy.DefaultCIDRLimit); err != nil {
		t.Errorf("64 items: %v", err)
	}
}

// TestOutputAddressesProperty compares the rules with what the key says of each interface, and checks that a
// second choice keeps the first.
func TestOutputAddressesProperty(t *testing.T) {
	address := rapid.Custom(func(t *rapid.T) netip.Addr {
		return netip.AddrFrom4([4]byte{10, 0, rapid.ByteRange(0, 2).Draw(t, "subnet"), rapid.ByteRange(1, 4).Draw(t, "host")})
	})
	rapid.Check(t, func(t *rapid.T) {
		var p policy.Policy
		p.Host.Value = true
		p.OutputAddresses.Value = rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
			return netip.PrefixFrom(address.Draw(t, "address"), rapid.SampledFrom([]int{24, 32}).Draw(t, "bits")).Masked()
		}), 0, 4).Draw(t, "items")
		p.PodPrefixes = rapid.SampledFrom([][]netip.Prefix{nil, cidrs("10.0.2.0/30")}).Draw(t, "pods")
		node := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) policy.NodeAddress {
			name, yes := rapid.SampledFrom([]string{"eth0", "eth1", "lo"}).Draw(t, "interface"), rapid.Bool()
			return policy.NodeAddress{Address: address.Draw(t, "address"), Interface: name, Shared: name == "lo", Up: rapid.IntRange(0, 4).Draw(t, "up") > 0,
				Deprecated: yes.Draw(t, "deprecated"), Secondary: yes.Draw(t, "secondary"), Unusable: rapid.IntRange(0, 4).Draw(t, "usable") == 0}
		}), 0, 6).Draw(t, "node")
		chosen := p.OutputAddressesOf(policy.IPv4, node, nil)
		p.Outputs = chosen
		c := policy.Desired([]policy.Policy{p}, policy.Layout{Sets: true}, policy.Owner{}).Chains[0]
		for _, out := range []string{"eth0", "eth1", "eth2"} {
			r := c.Walk(policy.Packet{Src: netip.MustParseAddr("10.9.0.1"), Dst: netip.MustParseAddr("203.0.113.1"), Out: out})
			if want := addressOf(p, node, out); r.Address != want {
				t.Fatalf("out of %s: %v, want %v of %v", out, r.Address, want, chosen)
			}
			local := c.Walk(policy.Packet{Src: netip.MustParseAddr("10.9.0.1"), SrcLocal: true, Dst: netip.MustParseAddr("203.0.113.1"), Out: out})
			if local.Address.IsValid() {
				t.Fatalf("the node's own traffic leaves with %s", local.Address)
			}
		}
		if again := p.OutputAddressesOf(policy.IPv4, node, chosen); fmt.Sprint(again) != fmt.Sprint(chosen) {
			t.Fatalf("%v, then %v", chosen, again)
		}
	})
}

// addressOf is the oracle: the address for an interface, the zero Addr if there is none.
func addressOf(p policy.Policy, node []policy.NodeAddress, out string) netip.Addr {
	for _, item := range p.OutputAddresses.Value {
		var primary, secondary []netip.Addr
		for _, a := range node {
			pods := false
			for _, b := range node {
				pods = pods || b.Interface == a.Interface && len(p.PodPrefixes) > 0 && p.PodPrefixes[0].Contains(b.Address)
			}
			switch {
			case a.Interface != out && a.Interface != "lo", !item.Contains(a.Address), !a.Up, a.Unusable, pods, a.Deprecated && item.Bits() < 32:
			case a.Secondary:
				secondary = append(secondary, a.Address)
			default:
				primary = append(primary, a.Address)
			}
		}
		for _, list := range [][]netip.Addr{primary, secondary} {
			if len(list) > 0 {
				return slices.MinFunc(list, netip.Addr.Compare)
			}
		}
	}
	return netip.Addr{}
}
