// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// NodeAddress is an address of the node, of global scope, with what rtnetlink(7) says of it and of its
// interface.
type NodeAddress struct {
	Address   netip.Addr
	Interface string
	Shared    bool // the interface is lo or a dummy: a packet with this source can leave through any other one
	Up        bool // the interface has IFF_UP; the carrier does not matter
	Unusable  bool // IFA_F_TENTATIVE, IFA_F_OPTIMISTIC or IFA_F_DADFAILED, or a temporary address (RFC 8981)

	Deprecated bool // no new connection should begin with it (RFC 4862, section 5.5.4)
	Secondary  bool // of IPv4: not the first of its subnet on the interface
}

// String returns the address, its interface and why it cannot be chosen.
func (a NodeAddress) String() string {
	text := a.Address.String() + " on " + quoteUnlessWord(a.Interface)
	switch {
	case !a.Up:
		text += " (down)"
	case a.Unusable:
		text += " (tentative or temporary)"
	case a.Deprecated:
		text += " (deprecated)"
	}
	return text
}

// OutputAddress is the address that pods leave with through an interface.
type OutputAddress struct {
	Interface string     `json:"interface,omitempty"` // "" is every interface that no other OutputAddress names
	Address   netip.Addr `json:"address"`

	Item   netip.Prefix `json:"-"` // of outputAddresses: the one that decides
	Others []netip.Addr `json:"-"` // the node's other addresses in the item, which could have been chosen
}

// String returns snat to 192.0.2.1 on eth0, or on other interfaces.
func (o OutputAddress) String() string {
	if o.Interface == "" {
		return fmt.Sprintf("snat to %s on other interfaces", o.Address)
	}
	return fmt.Sprintf("snat to %s on %s", o.Address, quoteUnlessWord(o.Interface))
}

// ServiceInterface is the dummy interface on which kube-proxy in mode ipvs has the addresses of all Services.
const ServiceInterface = "kube-ipvs0"

// OutputAddressesOf chooses the addresses that pods leave with, sorted by interface, with the one of every
// other interface last. There is none for an interface without an address in outputAddresses: its traffic is
// masqueraded. Of several addresses in one item the one in force stays.
func (p *Policy) OutputAddressesOf(f Family, node []NodeAddress, inForce []OutputAddress) []OutputAddress {
	bridges := map[string]bool{ServiceInterface: true} // and those of pods, which have an address inside a pod range
	for _, a := range node {
		if !bridges[a.Interface] && slices.ContainsFunc(p.Pods, func(pods netip.Prefix) bool { return pods.Contains(a.Address) }) {
			bridges[a.Interface] = true
		}
	}
	node = slices.DeleteFunc(slices.Clone(node), func(a NodeAddress) bool {
		return FamilyOf(a.Address) != f || !a.Up || a.Unusable || bridges[a.Interface]
	})
	var chosen []OutputAddress
	shared, found := p.outputAddress("", node, OutputAddressFor(inForce, f, ""))
	var names []string
	for _, a := range node {
		if !a.Shared && slices.ContainsFunc(p.Scope(f).Matches(), func(m Match) bool { return m.Out == "" || InterfaceWithin(a.Interface, m.Out) }) {
			names = append(names, a.Interface)
		}
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if own, found := p.outputAddress(name, node, OutputAddressFor(inForce, f, name)); found && own.Address != shared.Address {
			chosen = append(chosen, own)
		}
	}
	if found {
		chosen = append(chosen, shared)
	}
	return chosen
}

// LacksOutput reports whether the family has items and no address was chosen for it.
func (p *Policy) LacksOutput(f Family) bool {
	of := func(o OutputAddress) bool { return FamilyOf(o.Address) == f }
	return len(ofFamily(p.OutputAddresses.Value, f)) > 0 && !slices.ContainsFunc(p.Outputs, of)
}

// outputAddress chooses for one interface among its addresses and those that all interfaces share. One in
// force is kept.
func (p *Policy) outputAddress(name string, node []NodeAddress, inForce *OutputAddress) (OutputAddress, bool) {
	for _, item := range p.OutputAddresses.Value {
		var inside []NodeAddress
		for _, a := range node {
			if (a.Shared || a.Interface == name) && item.Contains(a.Address) && (!a.Deprecated || item.IsSingleIP()) {
				inside = append(inside, a)
			}
		}
		if len(inside) == 0 {
			continue
		}
		rank := func(a NodeAddress) int {
			switch {
			case inForce != nil && a.Address == inForce.Address:
				return 0
			case !a.Secondary:
				return 1
			}
			return 2
		}
		slices.SortFunc(inside, func(a, b NodeAddress) int {
			return cmp.Or(rank(a)-rank(b), a.Address.Compare(b.Address))
		})
		chosen := OutputAddress{Interface: name, Address: inside[0].Address, Item: item}
		for _, a := range inside {
			if a.Address != chosen.Address && !slices.Contains(chosen.Others, a.Address) {
				chosen.Others = append(chosen.Others, a.Address)
			}
		}
		return chosen, true
	}
	return OutputAddress{}, false
}

// OutputAddressFor returns the address for an interface, nil if there is none.
func OutputAddressFor(outputs []OutputAddress, f Family, name string) *OutputAddress {
	for i := range outputs { // the one for other interfaces is the last of its family
		if o := &outputs[i]; FamilyOf(o.Address) == f && (o.Interface == name || o.Interface == "") {
			return o
		}
	}
	return nil
}

// OutputItems returns the items of all policies, without duplicates, in a fixed order.
func OutputItems(policies []Policy) (items AddressItems) {
	for _, p := range policies {
		items = append(items, p.OutputAddresses.Value...)
	}
	slices.SortFunc(items, netip.Prefix.Compare)
	return slices.Compact(items)
}

// Families returns the families that have items.
func (items AddressItems) Families() []Family {
	return slices.DeleteFunc(Families(), func(f Family) bool { return len(ofFamily(items, f)) == 0 })
}

// Concerned returns the addresses that decide what OutputAddressesOf chooses for the items: those inside, and
// the others of their interfaces.
func (items AddressItems) Concerned(node []NodeAddress) []NodeAddress {
	concerned := map[string]bool{} // by interface
	for _, a := range node {
		inside := func(item netip.Prefix) bool { return item.Contains(a.Address) }
		concerned[a.Interface] = a.Interface != ServiceInterface && (concerned[a.Interface] || slices.ContainsFunc(items, inside))
	}
	return slices.DeleteFunc(slices.Clone(node), func(a NodeAddress) bool { return !concerned[a.Interface] })
}

// LeftNode reports whether the address is on no interface that is up.
func LeftNode(a netip.Addr, node []NodeAddress) bool {
	return !slices.ContainsFunc(node, func(n NodeAddress) bool { return n.Address == a && n.Up })
}
