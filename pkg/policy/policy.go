// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
)

// Action is what a policy does with a packet.
type Action string

// The actions, by the names that metrics and explain use.
const (
	ActionMasquerade Action = "masquerade"
	ActionExempt     Action = "exempt"
	ActionOutOfScope Action = "out-of-scope"
)

// Origin is the key that a value comes from.
type Origin struct {
	Source SourceID
	Key    string
	Index  int    // of the item in a list; -1 for a scalar and for a default
	File   string // of the agent files; "" if it is not known
}

// String returns masqChain of network "podnet", or masqLinkLocal (built in), and the
// file of a value that has one. A built-in value without a key is "the built-in policy".
func (o Origin) String() string {
	switch {
	case o.Source.Kind == BuiltIn && o.Key == "":
		return "the built-in policy"
	case o.Source.Kind == BuiltIn:
		return fmt.Sprintf("%s (%s)", o.Key, o.Source)
	case o.File != "":
		return fmt.Sprintf("%s of %s (%s)", o.Key, o.Source, Printable(o.File))
	}
	return fmt.Sprintf("%s of %s", o.Key, o.Source)
}

// WithOrigins is a value with every key that sets it, BuiltIn for a default. PodCIDRs that
// no source states have no origin.
type WithOrigins[T any] struct {
	Value   T
	Origins []Origin
}

// Policy is the policy of one chain, merged from its sources.
type Policy struct {
	Chain   string
	Backend WithOrigins[Backend]

	// Destinations has each prefix once: link-local, multicast and broadcast, the defaults,
	// then those of networks by name and of the agent files, in the written order.
	Destinations []PrefixAction
	// ExemptSources are never masqueraded, regardless of the destination.
	ExemptSources []PrefixAction
	// Namespaces are those of nonMasqueradeNamespaces, and ExemptPods the addresses of their pods, which are
	// exempt sources too.
	Namespaces []NamedNamespace
	ExemptPods []PrefixAction

	// The scope: sourceCIDRs and outputInterfaces, where an empty list means all, and masqueradeHost.
	Sources    WithOrigins[[]netip.Prefix]
	Interfaces WithOrigins[[]string]
	Host       WithOrigins[bool]

	NomasqAllReservedRanges, MasqLinkLocal, MasqLinkLocalIPv6 WithOrigins[bool]

	EnableIPv6  WithOrigins[bool]
	RandomFully WithOrigins[bool]
	ToPorts     WithOrigins[Ports]

	PodCIDRs         WithOrigins[[]netip.Prefix]
	PodSubnets       []netip.Prefix // found by ADDs
	PodPrefixes      []netip.Prefix // what has pods, by all sources; PodRanges leaves out exempt sources
	Guard            WithOrigins[GuardMode]
	StaleConnections WithOrigins[StaleConnections] // "" if none is stated; see ResetsConnections
	EnforceExempt    WithOrigins[bool]
	BypassMark       WithOrigins[Mark]

	OutputAddresses WithOrigins[AddressItems]
	Outputs         []OutputAddress // those in force; see OutputAddressesOf

	// Conflicts are those between the sources. The policy has the value that is in
	// force of each.
	Conflicts ConflictErrors
}

const exemptSourcesKey = "nonMasqueradeSourceCIDRs"

// PrefixAction is a prefix with the action for the packets whose longest match it is.
type PrefixAction struct {
	Prefix  netip.Prefix
	Action  Action
	Origins []Origin
}

// HasKey reports whether a key states the prefix, if only as its default. Multicast and broadcast have none.
func (e *PrefixAction) HasKey() bool {
	for _, o := range e.Origins {
		if o.Key != "" {
			return true
		}
	}
	return false
}

// NamedNamespace is a namespace with every item that names it.
type NamedNamespace struct {
	Name    string
	Origins []Origin
}

// Families returns the families that the policy manages.
func (p Policy) Families() []Family {
	if p.EnableIPv6.Value {
		return Families()
	}
	return []Family{IPv4}
}
