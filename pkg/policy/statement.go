// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"reflect"
	"strings"
)

// Backend names what keeps the rules in the kernel.
type Backend string

// The values of the key backend. Auto states no preference.
const (
	Auto     Backend = "auto"
	IPTables Backend = "iptables"
	NFTables Backend = "nftables"
)

// Kind tells what sort of source a Source is.
type Kind string

// The kinds of sources. BuiltIn is where the defaults come from.
const (
	Network    Kind = "network"
	AgentFiles Kind = "agent-files"
	BuiltIn    Kind = "built-in"
)

// SourceID is somebody who states a policy: a network of the container runtime,
// by the name in its conflist, or the agents' files of the node, which are one
// source together and have no name.
type SourceID struct {
	Kind Kind   `json:"kind"`
	Name string `json:"name,omitempty"`
}

// String names the source as messages do: network "podnet", agent files.
func (s SourceID) String() string {
	switch s.Kind {
	case Network:
		return "network " + Quote(s.Name)
	case AgentFiles:
		return "the agent files"
	default:
		return "built in"
	}
}

// Compare orders sources: networks by name, then the agent files.
func (s SourceID) Compare(t SourceID) int {
	if s.Kind != t.Kind {
		if s.Kind == Network {
			return -1
		}
		return 1
	}
	return strings.Compare(s.Name, t.Name)
}

// SourcePolicy is what one source says, and only that: a nil list or pointer is a
// key that the source left out, which agrees with whatever others say. The
// names of the fields in JSON are the keys of the conflist entry, and a stored
// statement is read back by the same names.
type SourcePolicy struct {
	Chain   string  `json:"masqChain"`
	Backend Backend `json:"backend,omitempty"`

	NonMasqueradeCIDRs []netip.Prefix `json:"nonMasqueradeCIDRs,omitzero"`
	MasqueradeCIDRs    []netip.Prefix `json:"masqueradeCIDRs,omitzero"`

	NomasqAllReservedRanges *bool `json:"nomasqAllReservedRanges,omitempty"`
	MasqLinkLocal           *bool `json:"masqLinkLocal,omitempty"`
	MasqLinkLocalIPv6       *bool `json:"masqLinkLocalIPv6,omitempty"`
	EnableIPv6              *bool `json:"enableIPv6,omitempty"`

	SourceCIDRs              []netip.Prefix `json:"sourceCIDRs,omitzero"`
	NonMasqueradeSourceCIDRs []netip.Prefix `json:"nonMasqueradeSourceCIDRs,omitzero"`
	OutputInterfaces         []string       `json:"outputInterfaces,omitzero"`
	MasqueradeHost           *bool          `json:"masqueradeHost,omitempty"`

	RandomFully *bool  `json:"randomFully,omitempty"`
	ToPorts     *Ports `json:"toPorts,omitempty"`
}

// Equal reports whether both say the same in the same words. A list that was
// left out is not an empty one.
func (s SourcePolicy) Equal(t SourcePolicy) bool { return reflect.DeepEqual(s, t) }

// Source is a statement with the source that makes it.
type Source struct {
	ID     SourceID     `json:"source"`
	Policy SourcePolicy `json:"statement"`

	// Superseded is set on a network whose conflist is gone from the disk and
	// that a newcomer named there contradicts: of the two, this one yields.
	Superseded bool `json:"yields,omitempty"`

	// Order is the place in which the networks of a node came into force.
	// Where two contradict each other, the lower one holds.
	Order int64 `json:"order,omitempty"`

	// Places tells in which files the values stand, where the source is
	// made of several.
	Places Places `json:"places,omitempty"`
}
