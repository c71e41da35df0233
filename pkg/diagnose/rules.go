// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// addViolations adds the violations that are certain, or those that are only possible.
func (f *Finding) addViolations(all []violation, possible bool) {
	for _, v := range all {
		isPossible := v.doubt != ""
		if isPossible != possible {
			continue
		}
		exempt := strings.Join(policy.First(4, v.exempt), ", ")
		line := fmt.Sprintf("%s: applies to %s, which %s exempts", v.rule, exempt, v.chain)
		if isPossible {
			line += " (" + v.doubt + ")"
		}
		hint := hintFor(v.rule)
		if hint != "" {
			line += "; " + hint
		}
		f.Details = append(f.Details, line)
	}
}

// hintFor returns how a well-known program is told not to write its rule, or "".
func hintFor(r *thirdparty.Rule) string {
	inChain := func(prefix string) bool { return strings.HasPrefix(r.Chain, prefix) }
	inTable := func(prefix string) bool { return strings.HasPrefix(r.Table, prefix) }
	switch {
	case strings.HasPrefix(r.Comment, "kubenet:"):
		return "kubelet's kubenet: give --non-masquerade-cidr=0.0.0.0/0, then delete the rule or reboot"
	case inChain("KUBE-") || inTable("kube-proxy"):
		return "kube-proxy: leave --masquerade-all (iptables.masqueradeAll) off"
	case inChain("FLANNEL") || inTable("flannel"):
		return `flannel: write "ipMasq": false into its delegate (ConfigMap kube-flannel-cfg), ` +
			"run flanneld without --ip-masq, then reboot: its rules stay"
	case inTable("kindnet-ipmasq"):
		return "kindnet (sigs.k8s.io/kindnet, not kind's kindnetd): " +
			"run its kindnetd with --masquerading=false"
	case inChain("KIND-MASQ-AGENT"):
		return "kind's kindnetd always masquerades: " +
			"create the cluster with networking.disableDefaultCNI: true and another main plugin"
	case inChain("cali-") || inTable("calico"):
		return "Calico: set natOutgoing: false in the IPPool"
	case inChain("CILIUM_"):
		return "Cilium: set enable-ipv4-masquerade and enable-ipv6-masquerade to false"
	case inChain("AWS-SNAT"):
		return "Amazon VPC CNI: set AWS_VPC_K8S_CNI_EXTERNALSNAT=true"
	case inChain("CNI-") || inTable("cni_plugins"):
		return "a CNI plugin's ipMasq: " +
			"drain the node and set it to false in the conflist, as running pods keep their rules"
	case inTable("docker-bridges") || strings.Contains(r.String(), "docker0"):
		return "Docker: run dockerd with --ip-masq=false if its containers need no masquerading"
	}
	return ""
}

func overlappingChains(e *examination, f *Finding) {
	all := e.Rules.Policies()
	for i, p := range all {
		for _, q := range all[i+1:] {
			for _, family := range policy.Families() {
				if p.Scope(family).Overlaps(q.Scope(family)) {
					f.addExemptOf(p, q, family)
					f.addExemptOf(q, p, family)
				}
			}
		}
	}
}

// addExemptOf adds what one policy exempts and another one masquerades.
func (f *Finding) addExemptOf(p, q policy.Policy, family policy.Family) {
	exempt := p.DestinationsExempt(family).Without(q.DestinationsExempt(family))
	if len(exempt) > 0 {
		f.add("%s exempts %s, which %s masquerades", p.Chain, exempt, q.Chain)
	}
}

func masqueradeSources(e *examination, f *Finding) {
	ofAnyTable := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, ofAnyTable, netlink.RT_FILTER_TABLE)
	e.noteAs("list the routes", err)
	addresses, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	e.noteAs("list the addresses", err)
	for _, r := range routes {
		isDefault := r.Dst == nil || r.Dst.String() == "0.0.0.0/0"
		if !isDefault || r.Src == nil || r.Type != unix.RTN_UNICAST {
			continue
		}
		for _, hop := range nextHops(r) {
			e.addOtherSource(f, addresses, hop, r.Src)
		}
	}
	slices.Sort(f.Details)
	f.Details = slices.Compact(f.Details)
}

func nextHops(r netlink.Route) []*netlink.NexthopInfo {
	if len(r.MultiPath) > 0 {
		return r.MultiPath
	}
	return []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}}
}

// addOtherSource adds the address that masquerading takes for a next hop of a default route, unless it is the
// one that the route states, or pods leave with another one.
func (e *examination) addOtherSource(
	f *Finding, addresses []netlink.Addr, hop *netlink.NexthopInfo, stated net.IP,
) {
	chosen := masqueradeSource(addresses, hop.LinkIndex, hop.Gw)
	if chosen == nil || chosen.Equal(stated) {
		return
	}
	link, err := net.InterfaceByIndex(hop.LinkIndex)
	if err != nil || !e.masqueradesOut(link.Name) {
		return
	}
	route := "default route"
	if hop.Gw != nil {
		route += " via " + hop.Gw.String()
	}
	f.add("%s: MASQUERADE takes %s, and the %s has src %s", link.Name, chosen, route, stated)
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
				link, err := net.InterfaceByIndex(a.LinkIndex)
				if err == nil {
					f.add("%s is in %s, the subnet of %s", o.Address, a.IPNet, link.Name)
				}
			}
		}
	}
}

// masqueradesOut reports whether pods leave through the interface with the address that the kernel chooses.
func (e *examination) masqueradesOut(name string) bool {
	for _, p := range e.Rules.Policies() {
		isOut := isInterfaceOf(p, name)
		if isOut && policy.OutputAddressFor(p.Outputs, policy.IPv4, name) == nil {
			return true
		}
	}
	return false
}

// masqueradeSource returns the address that the kernel's masquerading takes for packets that leave through
// an interface to a next hop: inet_select_addr with scope global. The addresses are in the kernel's order. It
// returns nil if there is none.
func masqueradeSource(addresses []netlink.Addr, link int, nextHop net.IP) net.IP {
	var first, elsewhere net.IP
	for _, a := range addresses {
		if a.Flags&unix.IFA_F_SECONDARY != 0 || a.Scope != unix.RT_SCOPE_UNIVERSE {
			continue
		}
		if a.LinkIndex != link {
			if elsewhere == nil {
				elsewhere = a.IP
			}
			continue
		}
		subnet := cmp.Or(a.Peer, a.IPNet)
		if nextHop != nil && subnet.Contains(nextHop) {
			return a.IP
		}
		if first == nil {
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
			if includes(ports, port) {
				taken = append(taken, fmt.Sprint(port))
			}
		}
		if len(taken) > 0 {
			list := strings.Join(policy.First(4, taken), ", ")
			f.add("%s: source ports %s include node port %s", p.Chain, ports, list)
		}
	}
}

func includes(ports policy.Ports, port uint16) bool {
	for _, r := range ports {
		if r.First <= port && port <= r.Last {
			return true
		}
	}
	return false
}

// addRulesBeforeGuard adds the rules that keep packets from a guard. It asks about the packets that the guard
// catches: of pods in its scope, to destinations that its chain masquerades.
func addRulesBeforeGuard(f *Finding, g policy.Guard, rules *thirdparty.Ruleset, q guardQuestion) {
	multicast := policy.RangesOf(g.Family.Multicast()...) // which no guard catches
	q.notCaught = policy.Normalize(slices.Concat(g.Exempt, multicast))
	steps := maxSteps
	search := &thirdparty.Search{Ask: q.ask, Binds: q.binds, By: thirdparty.Destination, Steps: &steps}
	for _, source := range prefixesOf(g.Scope.Sources) {
		for _, m := range g.Scope.InterfaceMatches() {
			p := thirdparty.Packet{Src: source, Dst: g.Family.All()}
			p.Out = strings.ReplaceAll(m.Out, "+", "0") // one that the pattern matches
			if steps > 0 {
				search.About(rules, p)
			}
		}
	}
	if steps <= 0 { // what is left is asked about as a whole
		search.About(rules, thirdparty.Packet{Src: g.Family.All(), Dst: g.Family.All()})
	}
	for _, r := range search.Rules {
		f.add("%s: the guard of %s %ss these packets", r, g.Chain, g.Mode)
	}
}

// guardQuestion asks which rules keep packets from a guard.
type guardQuestion struct {
	rulesOf   func(thirdparty.Verdict) []*thirdparty.Rule // those of a verdict
	binds     func(thirdparty.Place) thirdparty.Answer    // as in thirdparty.Search
	notCaught policy.Ranges                               // destinations
}

func (q guardQuestion) ask(
	p thirdparty.Packet, v thirdparty.Verdict,
) ([]*thirdparty.Rule, thirdparty.Answer) {
	rules, destinations := q.rulesOf(v), policy.RangesOf(p.Dst)
	areCaught := len(destinations.Without(q.notCaught)) > 0
	if len(rules) == 0 || !areCaught {
		return nil, thirdparty.No
	}
	if destinations.Overlaps(q.notCaught) {
		return rules, thirdparty.Perhaps
	}
	return rules, thirdparty.Yes
}

func untrackers(v thirdparty.Verdict) []*thirdparty.Rule { return v.Untrackers }

func bypasses(v thirdparty.Verdict) []*thirdparty.Rule { return v.Bypasses }

func untrackedPods(e *examination, f *Finding) {
	for _, g := range e.Rules.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		rules, err := thirdparty.ReadBeforeConntrack(g.Family)
		e.noteAs("read the rules before connection tracking", err)
		addRulesBeforeGuard(f, g, rules, guardQuestion{rulesOf: untrackers, binds: notBound})
	}
}

func acceptedPods(e *examination, f *Finding) {
	for _, g := range e.Rules.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		isChain := func(at thirdparty.Place) bool {
			name, _ := masqChainOf(at)
			return name == g.Chain && at.Backend == policy.IPTables && e.hasChoice(at.Backend, at.Variant)
		}
		rules, err := thirdparty.ReadPostrouting(g.Family, isChain)
		e.noteAs("read the rules before the jump", err)
		addRulesBeforeGuard(f, g, rules, guardQuestion{rulesOf: bypasses, binds: bound})
	}
}
