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

func violations(e *examination, f *Finding) {
	for _, v := range e.violations {
		isPossible := v.doubt != ""
		if isPossible != (f.ID == "foreign-masquerade-possible") {
			continue
		}
		line := fmt.Sprintf("%s: applies to %s, which %s exempts", v.rule, strings.Join(policy.First(4, v.exempt), ", "), v.chain)
		if isPossible {
			line += " (" + v.doubt + ")"
		}
		if hint := hintFor(v.rule); hint != "" {
			line += "; " + hint
		}
		f.Details = append(f.Details, line)
	}
}

// hintFor returns how a well-known program is told not to write its rule, or "".
func hintFor(r *thirdparty.Rule) string {
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
		{strings.Contains(r.String(), "docker0"), "Docker: run dockerd with --ip-masq=false if its containers need no masquerading"},
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
	for _, p := range e.Rules.Policies() {
		isOut := isInterfaceOf(p, name)
		if isOut && policy.OutputAddressFor(p.Outputs, policy.IPv4, name) == nil {
			return true
		}
	}
	return false
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

// caught adds the rules to a finding that a search finds for packets which a guard catches: of pods, to
// destinations that its chain masquerades.
func (e *examination) caught(f *Finding, g policy.Guard, rules *thirdparty.Ruleset, search *thirdparty.Search) {
	multicast := policy.RangesOf(g.Family.Multicast()...) // which no guard catches
	notCaught := policy.Normalize(slices.Concat(g.Exempt, multicast))
	ask := search.Ask
	search.Ask = func(p thirdparty.Packet, v thirdparty.Verdict) ([]*thirdparty.Rule, thirdparty.Answer) {
		caught := policy.RangesOf(p.Dst).Without(notCaught)
		found, answer := ask(p, v)
		isPart := len(caught) > 0 && len(policy.RangesOf(p.Dst).Intersect(notCaught)) > 0
		switch {
		case len(caught) == 0:
			return nil, thirdparty.No
		case isPart:
			return found, min(answer, thirdparty.Perhaps)
		}
		return found, answer
	}
	search.By, search.Questions = thirdparty.Destination, 20_000
	for _, source := range prefixesOf(g.Scope.Sources) {
		for _, m := range g.Scope.Matches() {
			out := g.Scope.Representative(policy.Packet{Out: m.Out}).Out
			search.About(rules, thirdparty.Packet{Src: source, Dst: g.Family.All(), Out: strings.ReplaceAll(out, "+", "0")})
		}
	}
	for _, r := range search.Rules {
		f.add("%s: the guard of %s %ss these packets", r, g.Chain, g.Mode)
	}
}

// found tells that rules were found.
func found(rules []*thirdparty.Rule) ([]*thirdparty.Rule, thirdparty.Answer) {
	return rules, thirdparty.AnswerOf(len(rules) > 0)
}

func untrackedPods(e *examination, f *Finding) {
	for _, g := range e.Rules.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		rules, err := thirdparty.ReadBeforeConntrack(g.Family)
		e.noteAs("read the rules before connection tracking", err)
		e.caught(f, g, rules, &thirdparty.Search{
			Binds: notBound,
			Ask: func(_ thirdparty.Packet, v thirdparty.Verdict) ([]*thirdparty.Rule, thirdparty.Answer) {
				return found(v.Untrackers)
			},
		})
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
		e.caught(f, g, rules, &thirdparty.Search{
			Binds: func(thirdparty.Place) thirdparty.Answer { return thirdparty.Yes },
			Ask: func(_ thirdparty.Packet, v thirdparty.Verdict) ([]*thirdparty.Rule, thirdparty.Answer) {
				return found(v.Bypasses)
			},
		})
	}
}
