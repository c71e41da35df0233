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
	Shared    bool // the interface is lo or a dummy: a packet with this source can leave through any other
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
	node = p.usableAddresses(f, node)
	shared, hasShared := p.outputAddress("", node, OutputAddressFor(inForce, f, ""))
	scope := p.Scope(f)
	var names []string
	for _, a := range node {
		if !a.Shared && scope.leaves(a.Interface) {
			names = append(names, a.Interface)
		}
	}
	slices.Sort(names)
	var chosen []OutputAddress
	for _, name := range slices.Compact(names) {
		own, isFound := p.outputAddress(name, node, OutputAddressFor(inForce, f, name))
		if isFound && own.Address != shared.Address {
			chosen = append(chosen, own)
		}
	}
	if hasShared {
		chosen = append(chosen, shared)
	}
	return chosen
}

// usableAddresses returns the addresses of a family that pods can leave with: not those of interfaces to
// pods, which have an address inside a pod range, and of Services.
func (p *Policy) usableAddresses(f Family, node []NodeAddress) []NodeAddress {
	isLeftOut := map[string]bool{ServiceInterface: true} // by interface
	for _, a := range node {
		if containsAddress(p.PodPrefixes, a.Address) {
			isLeftOut[a.Interface] = true
		}
	}
	var usable []NodeAddress
	for _, a := range node {
		if FamilyOf(a.Address) == f && a.Up && !a.Unusable && !isLeftOut[a.Interface] {
			usable = append(usable, a)
		}
	}
	return usable
}

func containsAddress(prefixes []netip.Prefix, a netip.Addr) bool {
	for _, p := range prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// LacksOutput reports whether the family has items and no address was chosen for it.
func (p *Policy) LacksOutput(f Family) bool {
	if len(ofFamily(p.OutputAddresses.Value, f)) == 0 {
		return false
	}
	for _, o := range p.Outputs {
		if FamilyOf(o.Address) == f {
			return false
		}
	}
	return true
}

// outputAddress chooses for one interface among its addresses and those that all interfaces share: the first
// item that has one decides. One in force is kept.
func (p *Policy) outputAddress(
	name string, node []NodeAddress, inForce *OutputAddress,
) (OutputAddress, bool) {
	for _, item := range p.OutputAddresses.Value {
		var inside []NodeAddress
		for _, a := range node {
			isReachable := a.Shared || a.Interface == name
			isWanted := !a.Deprecated || item.IsSingleIP() // which names it
			if isReachable && isWanted && item.Contains(a.Address) {
				inside = append(inside, a)
			}
		}
		if len(inside) > 0 {
			return chooseAddress(name, item, inside, inForce), true
		}
	}
	return OutputAddress{}, false
}

// chooseAddress chooses among the addresses in an item: the one in force, else a primary one, else the
// lowest.
func chooseAddress(
	name string, item netip.Prefix, inside []NodeAddress, inForce *OutputAddress,
) OutputAddress {
	slices.SortFunc(inside, func(a, b NodeAddress) int {
		return cmp.Or(a.rank(inForce)-b.rank(inForce), a.Address.Compare(b.Address))
	})
	chosen := OutputAddress{Interface: name, Address: inside[0].Address, Item: item}
	for _, a := range inside {
		if a.Address != chosen.Address && !slices.Contains(chosen.Others, a.Address) {
			chosen.Others = append(chosen.Others, a.Address)
		}
	}
	return chosen
}

func (a *NodeAddress) rank(inForce *OutputAddress) int {
	switch {
	case inForce != nil && a.Address == inForce.Address:
		return 0
	case !a.Secondary:
		return 1
	}
	return 2
}

// OutputAddressFor returns the address for an interface, nil if there is none.
func OutputAddressFor(outputs []OutputAddress, f Family, name string) *OutputAddress {
	for i := range outputs { // the one for other interfaces is the last of its family
		o := &outputs[i]
		isFor := o.Interface == name || o.Interface == ""
		if isFor && FamilyOf(o.Address) == f {
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
func (items AddressItems) Families() (families []Family) {
	for _, f := range Families() {
		if len(ofFamily(items, f)) > 0 {
			families = append(families, f)
		}
	}
	return families
}

// Concerned returns the addresses that decide what OutputAddressesOf chooses for the items: those inside, and
// the others of their interfaces, as one of these inside a pod range makes its interface unusable.
func (items AddressItems) Concerned(node []NodeAddress) (concerned []NodeAddress) {
	hasItem := map[string]bool{} // by interface
	for _, a := range node {
		if containsAddress(items, a.Address) {
			hasItem[a.Interface] = true
		}
	}
	for _, a := range node {
		if hasItem[a.Interface] && a.Interface != ServiceInterface {
			concerned = append(concerned, a)
		}
	}
	return concerned
}

// LeftNode reports whether the address is on no interface that is up.
func LeftNode(a netip.Addr, node []NodeAddress) bool {
	for _, n := range node {
		if n.Address == a && n.Up {
			return false
		}
	}
	return true
}
