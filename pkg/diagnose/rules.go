// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// masqTable is the table of nftables that has the masquerade chains.
const masqTable = "ip-masq"

// enforcePriority is that of enforceExempt's base chain. The packets that it binds meet no rule of a later one.
const enforcePriority = 99

// masqChainOf returns the masquerade chain that the chain is, if it is one at all.
func masqChainOf(p thirdparty.Place) (string, bool) {
	switch {
	case p.Backend == policy.NFTables && p.Table == masqTable:
		return strings.CutPrefix(p.Chain, "masq-")
	case p.Backend == policy.IPTables && p.Table == "nat":
		return p.Chain, true
	}
	return "", false
}

// Owned returns a function that tells whether a chain is owned: by state, record or comment.
func Owned(s *enforce.State, rec store.Record, dataDir string) func(thirdparty.Place) bool {
	inIPTables := map[string]bool{}
	for _, o := range rec.Chains {
		inIPTables[o.Chain] = inIPTables[o.Chain] || o.Backend == policy.IPTables
	}
	for _, c := range s.Chains {
		inIPTables[c.Policy.Chain] = inIPTables[c.Policy.Chain] || c.Choice.Backend == policy.IPTables
	}
	return func(p thirdparty.Place) bool {
		name, _ := masqChainOf(p)
		return p.Table == masqTable || p.Table == netfilter.GuardTable || p.Backend == policy.IPTables && inIPTables[name] ||
			p.Owner.Schema > policy.RulesSchema || p.Owner.DataDir != "" && p.Owner.DataDir == policy.OwnedBy(dataDir).DataDir
	}
}

// violation is a third-party rule that masquerades what a policy exempts.
type violation struct {
	rule   thirdparty.Rule
	chain  string // of the policy
	exempt []string
	scoped bool // the policy states sourceCIDRs
}

// violationsIn returns which rule masquerades what which policy exempts, by rule and then
// by policy. A rule that is not Exact may apply to fewer packets.
func violationsIn(s *enforce.State, rules []thirdparty.Rule) (found []violation) {
	for _, r := range rules {
		for _, p := range s.Policies() {
			if exempt := exemptMasqueradedBy(s, r, p); len(exempt) > 0 {
				found = append(found, violation{r, p.Chain, exempt, len(p.Sources.Value) > 0})
			}
		}
	}
	return found
}

// exemptMasqueradedBy returns what the policy exempts and the rule masquerades, without what enforceExempt binds first.
func exemptMasqueradedBy(s *enforce.State, r thirdparty.Rule, p policy.Policy) (found []string) {
	from := p.Scope(r.Family).Sources
	if len(from) == 0 || r.Match.Out == "lo" ||
		len(p.Interfaces.Value) > 0 && !slices.ContainsFunc(p.Interfaces.Value, r.Match.Leaves) {
		return nil
	}
	exempt, sources := p.DestinationsExempt(r.Family), slices.Concat(p.ExemptSources, p.ExemptPods)
	if g := s.Guard.Of(policy.ChainFamily{Chain: p.Chain, Family: r.Family}); g != nil && g.Bound != nil && r.Priority > enforcePriority {
		exempt, sources = exempt.Without(g.Bound), p.ExemptSources
	}
	masqueraded := exempt.Intersect(r.Destinations(from))
	for _, e := range p.Destinations {
		// Multicast is not routed: a rule for it alone would be a finding on every node with a rule such as kindnet's.
		if e.Action == policy.ActionExempt && e.HasKey() && touches(masqueraded, e.Prefix) {
			found = append(found, e.Prefix.String())
		}
	}
	for _, e := range sources {
		if policy.FamilyOf(e.Prefix.Addr()) == r.Family && len(r.Destinations(policy.RangesOf(e.Prefix).Intersect(from))) > 0 {
			found = append(found, "all from "+e.Prefix.String())
		}
	}
	return found
}

// CountThirdParty returns how many fully decoded rules masquerade what a policy exempts.
func CountThirdParty(s *enforce.State, rules []thirdparty.Rule) int {
	return len(slices.DeleteFunc(slices.Clone(rules), func(r thirdparty.Rule) bool {
		return !r.Exact || len(violationsIn(s, []thirdparty.Rule{r})) == 0
	}))
}

// touches reports whether an address of the prefix is in the set, by binary search.
func touches(r policy.Ranges, p netip.Prefix) bool {
	prefix := netipx.RangeOfPrefix(p)
	i, _ := slices.BinarySearchFunc(r, prefix.From(), func(x netipx.IPRange, a netip.Addr) int { return x.To().Compare(a) })
	return i < len(r) && r[i].Overlaps(prefix)
}

func violations(e *examination, f *Finding) {
	for _, v := range e.violations {
		id := "foreign-masquerade"
		line := fmt.Sprintf("%s: applies to %s, which %s exempts", v.rule.Text, strings.Join(policy.First(4, v.exempt), ", "), v.chain)
		if doubt := e.doubt(v); doubt != "" {
			id, line = "foreign-masquerade-possible", line+" ("+doubt+")"
		}
		if hint := hintFor(v.rule); hint != "" {
			line += "; " + hint
		}
		if id == f.ID {
			f.Details = append(f.Details, line)
		}
	}
}

// doubt returns why the rule may not apply to pods; "" if it does.
func (e *examination) doubt(v violation) string {
	from := v.rule.Match.From
	var known policy.Ranges
	for _, p := range e.pods {
		if policy.FamilyOf(p.Addr()) == v.rule.Family {
			known = append(known, policy.RangesOf(p)...)
		}
	}
	switch {
	case !v.rule.Exact:
		return "not all of the rule was decoded"
	case from == nil || v.scoped:
		return ""
	case len(known) == 0:
		return "no pod network is known"
	case !from.Overlaps(policy.Normalize(known)):
		return "its sources are not in a known pod network"
	}
	return ""
}

// hintFor returns how a well-known program is told not to write its rule, or "".
func hintFor(r thirdparty.Rule) string {
	chain := func(prefix string) bool { return strings.HasPrefix(r.Chain, prefix) }
	for _, program := range []struct {
		wrote bool
		hint  string
	}{
		{strings.HasPrefix(r.Comment, "kubenet:"), "kubelet's kubenet: give --non-masquerade-cidr=0.0.0.0/0, then delete the rule or reboot"},
		{chain("KUBE-") || r.Table == "kube-proxy", "kube-proxy: leave --masquerade-all (iptables.masqueradeAll) off"},
		{chain("FLANNEL") || strings.HasPrefix(r.Table, "flannel"),
			`flannel: write "ipMasq": false into its delegate (ConfigMap kube-flannel-cfg), run flanneld without --ip-masq, then reboot: its rules stay`},
		{r.Table == "kindnet-ipmasq", "kindnet (sigs.k8s.io/kindnet, not kind's kindnetd): run its kindnetd with --masquerading=false"},
		{chain("KIND-MASQ-AGENT"),
			"kind's kindnetd always masquerades: create the cluster with networking.disableDefaultCNI: true and another main plugin"},
		{chain("cali-"), "Calico: set natOutgoing: false in the IPPool"},
		{chain("CILIUM_"), "Cilium: set enable-ipv4-masquerade and enable-ipv6-masquerade to false"},
		{chain("AWS-SNAT"), "Amazon VPC CNI: set AWS_VPC_K8S_CNI_EXTERNALSNAT=true"},
		{chain("CNI-") || strings.HasPrefix(r.Table, "cni_plugins"),
			"a CNI plugin's ipMasq: drain the node and set it to false in the conflist, as running pods keep their rules"},
		{slices.Contains(r.Match.NotOut, "docker0"), "Docker: run dockerd with --ip-masq=false if its containers need no masquerading"},
	} {
		if program.wrote {
			return program.hint
		}
	}
	return ""
}

func overlappingChains(e *examination, f *Finding) {
	exempts := func(p, q policy.Policy, family policy.Family) {
		if exempt := p.DestinationsExempt(family).Without(q.DestinationsExempt(family)); len(exempt) > 0 {
			f.add("%s exempts %s, which %s masquerades", p.Chain, exempt, q.Chain)
		}
	}
	all := e.Rules.Policies()
	for i, p := range all {
		for _, q := range all[i+1:] {
			for _, family := range policy.Families() {
				if p.Scope(family).Overlaps(q.Scope(family)) {
					exempts(p, q, family)
					exempts(q, p, family)
				}
			}
		}
	}
}

func masqueradeSources(e *examination, f *Finding) {
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	e.noteAs("list the routes", err)
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	e.noteAs("list the addresses", err)
	for _, r := range routes {
		isDefault := r.Dst == nil || r.Dst.String() == "0.0.0.0/0"
		if !isDefault || r.Src == nil || r.Type != unix.RTN_UNICAST {
			continue
		}
		hops := r.MultiPath
		if len(hops) == 0 {
			hops = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}}
		}
		for _, hop := range hops {
			link, err := net.InterfaceByIndex(hop.LinkIndex)
			chosen := masqueradeSource(addresses, hop.LinkIndex, hop.Gw)
			if err != nil || !e.masqueradesOut(link.Name) || chosen == nil || chosen.Equal(r.Src) {
				continue
			}
			via := ""
			if hop.Gw != nil {
				via = " via " + hop.Gw.String()
			}
			f.add("%s: MASQUERADE takes %s, and the default route%s has src %s", link.Name, chosen, via, r.Src)
		}
	}
	slices.Sort(f.Details)
	f.Details = slices.Compact(f.Details)
}

func connectedOutputs(e *examination, f *Finding) {
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	e.noteAs("list the addresses", err)
	for _, p := range e.Rules.Policies() {
		for _, o := range p.Outputs {
			if o.Interface != "" {
				continue
			}
			ip := net.IP(o.Address.AsSlice())
			for _, a := range addresses {
				if a.IP.Equal(ip) || !a.Contains(ip) {
					continue
				}
				if link, err := net.InterfaceByIndex(a.LinkIndex); err == nil {
					f.add("%s is in %s, the subnet of %s", o.Address, a.IPNet, link.Name)
				}
			}
		}
	}
}

// masqueradesOut reports whether pods leave through the interface with the address that the kernel chooses.
func (e *examination) masqueradesOut(name string) bool {
	return slices.ContainsFunc(e.Rules.Policies(), func(p policy.Policy) bool {
		return policy.OutputAddressFor(p.Outputs, policy.IPv4, name) == nil &&
			(len(p.Interfaces.Value) == 0 || slices.ContainsFunc(p.Interfaces.Value, thirdparty.Packets{Out: name}.Leaves))
	})
}

// masqueradeSource returns the address that the kernel's masquerading takes for packets that leave through
// an interface to a next hop: inet_select_addr with scope global. The addresses are in the kernel's order.
func masqueradeSource(addresses []netlink.Addr, link int, nextHop net.IP) net.IP {
	var first, elsewhere net.IP
	for _, a := range addresses {
		subnet := cmp.Or(a.Peer, a.IPNet)
		switch {
		case a.Flags&unix.IFA_F_SECONDARY != 0 || a.Scope != unix.RT_SCOPE_UNIVERSE:
		case a.LinkIndex != link && elsewhere == nil:
			elsewhere = a.IP
		case a.LinkIndex != link:
		case nextHop != nil && subnet.Contains(nextHop):
			return a.IP
		case first == nil:
			first = a.IP
		}
	}
	if first == nil {
		return elsewhere
	}
	return first
}

func nodePortOverlap(e *examination, f *Finding) {
	nodePorts, err := thirdparty.NodePorts()
	e.noteAs("read the rules of kube-proxy", err)
	for _, p := range e.Rules.Policies() {
		ports := p.ToPorts.Value
		if len(ports) == 0 && p.RandomFully.Value {
			ports = policy.Ports{{First: 1024, Last: 65535}} // of connections from unprivileged ports
		}
		var taken []string
		for _, port := range nodePorts {
			if slices.ContainsFunc(ports, func(r policy.PortRange) bool { return r.First <= port && port <= r.Last }) {
				taken = append(taken, fmt.Sprint(port))
			}
		}
		if len(taken) > 0 {
			f.add("%s: source ports %s include node port %s", p.Chain, ports, strings.Join(policy.First(4, taken), ", "))
		}
	}
}

// caught adds the rules to a finding that apply to packets which a guard catches, as read for each guard.
func (e *examination) caught(f *Finding, what string, read func(policy.Guard) ([]thirdparty.Rule, error)) {
	for _, g := range e.Rules.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		rules, err := read(g)
		e.noteAs("read the rules before "+what, err)
		multicast := policy.RangesOf(g.Family.Multicast()...) // which no guard catches
		masqueraded := policy.RangesOf(g.Family.All()).Without(g.Exempt).Without(multicast)
		for _, r := range rules {
			outOfScope := len(g.Scope.Interfaces) > 0 && !slices.ContainsFunc(g.Scope.Interfaces, r.Match.Leaves) || r.Match.Out == "lo"
			if r.Family == g.Family && !outOfScope && r.Destinations(g.Scope.Sources).Overlaps(masqueraded) {
				f.add("%s: the guard of %s %ss these packets", r.Text, g.Chain, g.Mode)
			}
		}
	}
}

func untrackedPods(e *examination, f *Finding) {
	e.caught(f, "connection tracking", func(policy.Guard) ([]thirdparty.Rule, error) { return thirdparty.Untracked() })
}

func acceptedPods(e *examination, f *Finding) {
	e.caught(f, "the jump", func(g policy.Guard) ([]thirdparty.Rule, error) {
		return thirdparty.Accepted(func(at thirdparty.Place) bool {
			name, _ := masqChainOf(at)
			return name == g.Chain && at.Backend == policy.IPTables && e.hasChoice(at.Backend, at.Variant)
		})
	})
}
