// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
)

// Backend names what holds the rules in the kernel.
type Backend string

// The values of the key backend. Auto states no preference.
const (
	Auto     Backend = "auto"
	IPTables Backend = "iptables"
	NFTables Backend = "nftables"
)

// Kind is the kind of a source.
type Kind string

// The kinds of sources. The defaults come from BuiltIn.
const (
	Network    Kind = "network"
	AgentFiles Kind = "agent-files"
	BuiltIn    Kind = "built-in"
)

// SourceID identifies a source of policy: a network of the container runtime, by
// the name in its conflist, or the agent files of the node, which together are one
// source without a name.
type SourceID struct {
	Kind Kind   `json:"kind"`
	Name string `json:"name,omitempty"`
}

// String returns the name for messages: network "podnet", the agent files.
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
	byKind := strings.Compare(string(t.Kind), string(s.Kind)) // descending: "network" is after "agent-files"
	return cmp.Or(byKind, strings.Compare(s.Name, t.Name))
}

// SourcePolicy is what one source asks for. A nil list or pointer is a key that the
// source leaves out, which agrees with every value. The JSON names are the keys of
// the plugin entry; stored documents use them too.
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

	PodCIDRs         []netip.Prefix   `json:"podCIDRs,omitzero"`
	Guard            GuardMode        `json:"guard,omitempty"`
	StaleConnections StaleConnections `json:"staleConnections,omitempty"`
	EnforceExempt    *bool            `json:"enforceExempt,omitempty"`
	BypassMark       *Mark            `json:"bypassMark,omitempty"`

	OutputAddresses AddressItems `json:"outputAddresses,omitzero"`

	NonMasqueradeNamespaces Namespaces `json:"nonMasqueradeNamespaces,omitzero"`
}

// Equal reports whether both have the same keys with the same values. A list that
// is left out is not equal to an empty one.
func (s SourcePolicy) Equal(t SourcePolicy) bool {
	// Reflection takes 0.2 µs for each item of a list, and these can have a million.
	if !equalLists(s.NonMasqueradeCIDRs, t.NonMasqueradeCIDRs) ||
		!equalLists(s.MasqueradeCIDRs, t.MasqueradeCIDRs) {
		return false
	}
	s.NonMasqueradeCIDRs, s.MasqueradeCIDRs = nil, nil
	t.NonMasqueradeCIDRs, t.MasqueradeCIDRs = nil, nil
	return reflect.DeepEqual(s, t)
}

func equalLists(a, b []netip.Prefix) bool {
	isStated := a != nil
	return isStated == (b != nil) && slices.Equal(a, b)
}

// Source is a source with its policy.
type Source struct {
	ID     SourceID     `json:"source"`
	Policy SourcePolicy `json:"policy"`

	// Files has the policy of each agent file, so that explain can name the file of a value. All of them
	// state the same chain, and Policy then has only the chain.
	Files []FilePolicy `json:"files,omitempty"`

	// Superseded is set on a network whose conflist is gone from the disk and that
	// conflicts with a newer network that has one: the newer one wins.
	Superseded bool `json:"superseded,omitempty"`

	// Order numbers the networks of a node as they came into force. Of two that
	// conflict, the lower number wins.
	Order int64 `json:"order,omitempty"`

	// ConfDir is the directory of conflists that plugin.toml names, if the policy comes from the network's
	// conflist there. It is "" if the policy came from an ADD, or was stored without a plugin.toml.
	ConfDir string `json:"confDir,omitempty"`

	// PodSubnets are the subnets of a network's pods that ADDs found, sorted. They are
	// no part of what the source asks for.
	PodSubnets []netip.Prefix `json:"podSubnets,omitzero"`
}

// FilePolicy is what one of the agent files asks for.
type FilePolicy struct {
	File   string       `json:"file"` // its path, or the name of another place
	Policy SourcePolicy `json:"policy"`
}

// files returns the policies that make up the source. That of a network has no file.
func (s Source) files() []FilePolicy {
	if len(s.Files) > 0 {
		return s.Files
	}
	return []FilePolicy{{Policy: s.Policy}}
}

// Policies returns what the source asks for: one policy, or one for each agent file.
func (s Source) Policies() []SourcePolicy {
	var all []SourcePolicy
	for _, f := range s.files() {
		all = append(all, f.Policy)
	}
	return all
}

// Validate checks a stored source. One of the agent files can enable IPv6 for all of
// them.
func (s Source) Validate(limit int) error {
	all := s.Policies()
	ipv6 := false
	for _, p := range all {
		ipv6 = ipv6 || isTrue(p.EnableIPv6)
	}
	for _, p := range all {
		p.EnableIPv6 = &ipv6
		if err := p.Validate(limit); err != nil {
			return err
		}
	}
	var errs fieldErrors
	errs.checkPrefixes("podSubnets", s.PodSubnets, true)
	return errors.Join(errs...)
}

// AddPodSubnets adds subnets that an ADD found, and reports whether one is new. The
// error is that there are too many: then none is added.
func (s *Source) AddPodSubnets(found ...netip.Prefix) (bool, error) {
	all := slices.Concat(s.PodSubnets, found)
	slices.SortFunc(all, netip.Prefix.Compare)
	all = slices.Compact(all)
	if len(all) == len(s.PodSubnets) {
		return false, nil
	}
	if len(all) > MaxPodCIDRs {
		return false, fmt.Errorf("%s: the pods of this node are in more than %d subnets, and %s is left out; "+
			"write podCIDRs", s.ID, MaxPodCIDRs, found[:min(8, len(found))])
	}
	s.PodSubnets = all
	return true, nil
}

// Defaults of the scalars of a policy, and limits on a document.
const (
	DefaultChain     = "IP-MASQ-AGENT"
	DefaultCIDRLimit = 64
	MaxCIDRLimit     = 1_000_000
)

// DefaultNonMasqueradeCIDRs returns the destinations that are exempt when no source
// names any: private address space (RFC 1918) or, if reserved, every IPv4 range that
// an RFC reserves, in the order of ip-masq-agent.
func DefaultNonMasqueradeCIDRs(reserved bool) []netip.Prefix {
	list := []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"}
	if reserved {
		list = append(list,
			"100.64.0.0/10",   // shared address space, RFC 6598
			"192.0.0.0/24",    // IETF protocol assignments, RFC 6890
			"192.0.2.0/24",    // TEST-NET-1, RFC 5737
			"192.88.99.0/24",  // 6to4 relay anycast, RFC 7526
			"198.18.0.0/15",   // benchmarking, RFC 2544
			"198.51.100.0/24", // TEST-NET-2, RFC 5737
			"203.0.113.0/24",  // TEST-NET-3, RFC 5737
			"240.0.0.0/4",     // former class E, RFC 1112
		)
	}
	var prefixes []netip.Prefix
	for _, s := range list {
		prefixes = append(prefixes, netip.MustParsePrefix(s))
	}
	return prefixes
}

func isTrue(b *bool) bool { return b != nil && *b }
