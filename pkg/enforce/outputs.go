// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// desireOutputs chooses the addresses that pods leave with. It reads those of the node, if a policy needs
// them.
func (e *Enforcer) desireOutputs(s *State) {
	var err error
	items := neededItems(s.Policies(), s.onRecord.now)
	if len(items) > 0 {
		s.node.addresses, err = e.nodeAddresses(items.Families())
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		if len(c.Policy.OutputAddresses.Value) > 0 {
			c.fail(err)
			c.Policy.Outputs, c.changed = s.chosenOutputs(&c.Policy)
		}
	}
}

// nodeAddresses reads the addresses of the node, of some families. The list is nil if they cannot be read.
func (e *Enforcer) nodeAddresses(families []policy.Family) ([]policy.NodeAddress, error) {
	list, err := e.Addresses(families)
	if err != nil {
		return nil, err
	}
	return append([]policy.NodeAddress{}, list...), nil
}

// neededItems returns the items of the policies, and the addresses that are or were in force by the record:
// connections that are translated to those end when they leave the node.
func neededItems(policies []policy.Policy, rec store.Record) policy.AddressItems {
	items := policy.OutputItems(policies)
	for _, a := range inForce(rec) {
		items = append(items, netip.PrefixFrom(a.Address, a.Address.BitLen()))
	}
	return items
}

// inForce returns the addresses that are or were in force by the record.
func inForce(rec store.Record) []store.ChainAddress {
	all := slices.Clone(rec.Former)
	for _, o := range rec.Outputs {
		for _, a := range o.Addresses {
			all = append(all, store.ChainAddress{Chain: o.Chain, Address: a.Address})
		}
	}
	slices.SortFunc(all, store.ChainAddress.Compare)
	return slices.Compact(all)
}

// left returns the addresses that were in force and are not on the node any more.
func (s *State) left() (left []store.ChainAddress) {
	for _, a := range inForce(s.onRecord.now) {
		if s.hasLeft(a.Address) {
			left = append(left, a)
		}
	}
	return left
}

// former returns the addresses that were in force, are on the node, and are not in force by these outputs.
func (s *State) former(outputs []store.Outputs) (former []store.ChainAddress) {
	now := inForce(store.Record{Outputs: outputs})
	for _, a := range inForce(s.onRecord.now) {
		if !slices.Contains(now, a) && !s.hasLeft(a.Address) {
			former = append(former, a)
		}
	}
	return former
}

// hasLeft reports whether an address is known not to be on the node.
func (s *State) hasLeft(a netip.Addr) bool {
	return s.node.addresses != nil && policy.LeftNode(a, s.node.addresses)
}

// DependsOnAddresses reports whether the addresses of the node decide about rules or connections.
func (s *State) DependsOnAddresses() bool { return len(neededItems(s.Policies(), s.onRecord.now)) > 0 }

// AddressDigest returns the items of outputAddresses and a digest of the addresses that decide what is chosen
// for them, "" without items. It has no white space.
func (s *State) AddressDigest() string {
	return addressDigest(neededItems(s.Policies(), s.onRecord.now), s.node.addresses)
}

func addressDigest(items policy.AddressItems, node []policy.NodeAddress) string {
	if len(items) == 0 {
		return ""
	}
	var words []string
	for _, item := range items {
		words = append(words, item.String())
	}
	return strings.Join(words, ",") + "=" + store.Digest(fmt.Sprint(items.Concerned(node)))
}

// SameAddresses reports whether the node has the addresses of an AddressDigest.
func (e *Enforcer) SameAddresses(digest string) bool {
	list, _, found := strings.Cut(digest, "=")
	if !found {
		return digest == ""
	}
	var items policy.AddressItems
	for text := range strings.SplitSeq(list, ",") {
		item, err := policy.ParsePrefix(text)
		if err != nil {
			return false
		}
		items = append(items, item)
	}
	node, err := e.nodeAddresses(items.Families())
	return err == nil && digest == addressDigest(items, node)
}

// chosenOutputs returns the addresses that the list of a policy chooses, and whether others are on record.
// One that is in force stays while the list is the same.
func (s *State) chosenOutputs(p *policy.Policy) (chosen []policy.OutputAddress, isNew bool) {
	var recorded []policy.OutputAddress
	for _, o := range s.onRecord.now.Outputs {
		if o.Chain == p.Chain && slices.Equal(o.Items, p.OutputAddresses.Value) {
			recorded = o.Addresses
		}
	}
	for _, f := range p.Families() {
		chosen = append(chosen, p.OutputAddressesOf(f, s.node.addresses, recorded)...)
	}
	return chosen, !slices.EqualFunc(chosen, recorded, sameOutput)
}

func sameOutput(a, b policy.OutputAddress) bool {
	return a.Interface == b.Interface && a.Address == b.Address
}

// outputs returns what the record has to have: of a chain that cannot be written, what it had before. The
// addresses in force are in the record, with the resets that are due when they leave the node: both have to
// survive the process together.
func (s *State) outputs(before store.Record) (all []store.Outputs) {
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Err != nil {
			all = append(all, outputsOf(before, c.Policy.Chain)...)
			continue
		}
		o := store.Outputs{Chain: c.Policy.Chain, Items: c.Policy.OutputAddresses.Value}
		for _, a := range c.Policy.Outputs {
			chosen := policy.OutputAddress{Interface: a.Interface, Address: a.Address}
			o.Addresses = append(o.Addresses, chosen)
		}
		if len(o.Items) > 0 {
			all = append(all, o)
		}
	}
	return all
}

func outputsOf(rec store.Record, chain string) (all []store.Outputs) {
	for _, o := range rec.Outputs {
		if o.Chain == chain {
			all = append(all, o)
		}
	}
	return all
}

// recordedItems returns the list of outputAddresses for which the addresses of a chain were recorded.
func recordedItems(rec store.Record, chain string) policy.AddressItems {
	outputs := outputsOf(rec, chain)
	if len(outputs) == 0 {
		return nil
	}
	return outputs[0].Items
}

// AmbiguousOutputs returns the choices that the list does not decide alone.
func (s *State) AmbiguousOutputs() (errs []error) {
	for _, c := range s.Chains {
		for _, o := range c.Policy.Outputs {
			if len(o.Others) > 0 {
				others := strings.Trim(fmt.Sprint(o.Others), "[]")
				errs = append(errs, fmt.Errorf("chain %s: %s has several addresses of the node: %s is in force, "+
					"not %s; name the address itself to be sure of it", c.Policy.Chain, o.Item, o, others))
			}
		}
	}
	return errs
}

// NoOutputs returns the chains whose list results in no rule for a family of which the node has addresses.
func (s *State) NoOutputs() (none []Inactive) {
	for _, at := range s.missingOutputs() {
		if node := s.nodeAddressesOf(at.family); len(node) > 0 {
			none = append(none, at.inactive("no usable address of the node is in outputAddresses (%s), so pods "+
				"leave with the address that MASQUERADE takes; the node has %s: add a prefix of one of these that is "+
				"on no interface of pods, or add the address to the node", at.items(), strings.Join(node, ", ")))
		}
	}
	return none
}

// NoAddresses returns the chains whose list has items of a family of which the node has no address, but those
// of pods. One list is for all nodes, so that is no mistake.
func (s *State) NoAddresses() (none []Inactive) {
	for _, at := range s.missingOutputs() {
		if len(s.nodeAddressesOf(at.family)) == 0 {
			none = append(none, at.inactive("the node has no address of this family, except those of pods, "+
				"so outputAddresses (%s) has no effect for it", at.items()))
		}
	}
	return none
}

// missingOutput is a policy whose list results in no rule for a family that has items.
type missingOutput struct {
	policy *policy.Policy
	family policy.Family
}

func (s *State) missingOutputs() (all []missingOutput) {
	for i := range s.Chains {
		c := &s.Chains[i]
		for _, f := range c.Policy.Families() {
			if c.Err == nil && c.Policy.LacksOutput(f) {
				all = append(all, missingOutput{&c.Policy, f})
			}
		}
	}
	return all
}

func (l missingOutput) items() string {
	var items []string
	for _, item := range l.policy.OutputAddresses.Value {
		items = append(items, item.String())
	}
	return strings.Join(items, ", ")
}

func (l missingOutput) inactive(format string, args ...any) Inactive {
	return Inactive{policy.ChainFamily{Chain: l.policy.Chain, Family: l.family}, fmt.Errorf(format, args...)}
}

// nodeAddressesOf returns the addresses of the node without those in the pod ranges of any policy, those of
// Services, and those of 169.254.0.0/16, which NodeLocal DNSCache and others add with scope global, and with
// which nothing leaves a link (RFC 3927, section 2.7).
func (s *State) nodeAddressesOf(f policy.Family) (node []string) {
	var pods []netip.Prefix
	for i := range s.Chains {
		pods = append(pods, s.Chains[i].Policy.PodPrefixes...)
	}
	inPods := policy.RangesOf(pods...)
	for _, a := range s.node.addresses {
		isOfNode := a.Interface != policy.ServiceInterface && !inPods.Contains(a.Address)
		if policy.FamilyOf(a.Address) == f && isOfNode && !a.Address.IsLinkLocalUnicast() {
			node = append(node, a.String())
		}
	}
	return node
}
