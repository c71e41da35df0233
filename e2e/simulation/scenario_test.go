// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// most is how many pods there are.
const most = 4

// scenario is everything that a seed decides but the order of effects.
type scenario struct {
	seed   uint64
	order  uint64 // of effects; a seed has 0
	chains []chainSpec
	nets   []netSpec
	ops    []*op
	legacy bool
	tables bool // the host has a program iptables
	admin  bool // it has a plugin.toml

	outputs     int  // one chain in so many has outputAddresses
	manage, own bool // reconcilers manage the conflist of the first network; they have one of their own
}

// chainSpec is what the sources of one chain agree on, as keys of a plugin entry.
type chainSpec struct {
	Chain         string         `json:"masqChain"`
	Backend       string         `json:"backend,omitempty"`
	Guard         string         `json:"guard,omitempty"`
	Stale         string         `json:"staleConnections,omitempty"`
	EnforceExempt bool           `json:"enforceExempt,omitempty"`
	IPv6          bool           `json:"enableIPv6,omitempty"`
	Scope         []netip.Prefix `json:"sourceCIDRs,omitempty"`
	Outputs       []netip.Prefix `json:"outputAddresses,omitempty"`
}

// netSpec is a source: a network, or the agent files.
type netSpec struct {
	name     string
	agent    bool
	admin    bool // the host has a plugin.toml
	number   int
	versions []*version
}

// version is one policy of a source, as keys of a plugin entry.
type version struct {
	*chainSpec
	Exempt []netip.Prefix `json:"nonMasqueradeCIDRs"`
	Masq   []netip.Prefix `json:"masqueradeCIDRs,omitempty"`
	Spaces []string       `json:"nonMasqueradeNamespaces,omitempty"`

	net     *netSpec
	number  int
	refused bool // the kernel accepts it only while it refuses nothing
}

func (v *version) String() string {
	if v == nil {
		return "none"
	}
	return fmt.Sprintf("%s/%d", v.net.name, v.number)
}

// op is one operation of a scenario.
type op struct {
	kind    string
	net     int
	pod     int
	version int
	number  int
	wait    bool // until it has ended before the next operation begins

	event event
}

// event is what happens to a process instead of, or before, one of its effects.
type event struct {
	what string // "kill", "fail", "tamper" by another program before it, "pause" until no other process can go on, or "begin" of the operation
	of   string // what effects count: their beginning, "" for all writes
	at   int    // the first one is 1
}

// counted are the beginnings of effects that count.
var counted = []string{
	"", "rename", "kernel: ", "kernel: write", "kernel: write guards", "kernel: remove", "kernel: walk", "kernel: observe", "kernel: ask",
	"kernel: read addresses", "list",
}

// due counts an effect, and reports whether the event happens at it.
func (e *event) due(t *ticket) bool {
	if e.of == "" && t.writes || e.of != "" && strings.HasPrefix(t.text, e.of) {
		e.at--
		return e.at == 0
	}
	return false
}

func (o *op) String() string {
	text := o.kind
	switch o.kind {
	case "add", "stale add", "del", "check", "connect":
		text += fmt.Sprintf(" pod%d", o.pod)
	case "conflist":
		text += fmt.Sprintf(" net%d/%d", o.net, o.version)
	case "gc", "no conflist", "bad file", "status", "agree":
		text += fmt.Sprintf(" net%d", o.net)
	case "damage", "lose":
		text += fmt.Sprintf(" net%d %d", o.net, o.number)
	case "tamper", "fight", "sleep", "address":
		text += fmt.Sprintf(" %d", o.number)
	}
	if e := o.event; e.what != "" {
		text += fmt.Sprintf(" [%s at %s %d]", e.what, cmp.Or(e.of, "write"), e.at)
	}
	if !o.wait {
		text += " &"
	}
	return text
}

var (
	exemptions = prefixList("10.0.0.0/8 10.20.30.0/24 192.0.2.128/25 172.16.0.0/12 fd00:1::/32 2001:db8:8::/48")
	exceptions = prefixList("10.20.0.0/16 192.0.2.0/24 10.20.30.64/26 fd00:1:2::/48")
	refusable  = netip.MustParsePrefix("198.18.0.0/15")
	linkLocal  = prefixList("169.254.0.0/16 fe80::/10")
	// destinations has an address for each case of the longest prefix. Those of versions come on top.
	destinations = addressList("8.8.8.8 10.1.1.1 10.20.1.1 10.20.30.1 10.20.30.65 192.0.2.1 192.0.2.129 172.16.0.1 192.168.1.1 " +
		"169.254.1.1 198.18.0.1 2001:db8:1::1 fd00:1:1::1 fd00:1:2::1 2001:db8:8::1")
	spaces = []string{"", "system", "web"}
	// nodeAddresses are those of the node: the first of each family is what MASQUERADE takes, the others come and go.
	nodeAddresses = []policy.NodeAddress{
		{Address: netip.MustParseAddr("198.51.100.7"), Interface: "eth0", Up: true}, {Address: netip.MustParseAddr("2001:db8:ffff::7"), Interface: "eth0", Up: true},
		{Address: netip.MustParseAddr("198.51.101.8"), Interface: "eth0", Up: true}, {Address: netip.MustParseAddr("203.0.113.9"), Interface: "lo", Shared: true, Up: true},
		{Address: netip.MustParseAddr("2001:db8:fffe::7"), Interface: "eth0", Up: true},
	}
)

func prefixList(s string) (all []netip.Prefix) {
	for _, f := range strings.Fields(s) {
		all = append(all, netip.MustParsePrefix(f))
	}
	return all
}

func addressList(s string) (all []netip.Addr) {
	for _, f := range strings.Fields(s) {
		all = append(all, netip.MustParseAddr(f))
	}
	return all
}

// marks are exempt by this version alone.
func (v *version) marks() []netip.Prefix {
	m := prefixList(fmt.Sprintf("100.64.%d.%d/32", v.net.number, v.number))
	if v.IPv6 {
		m = append(m, prefixList(fmt.Sprintf("fd99:%d:%d::/48", v.net.number, v.number))...)
	}
	return m
}

// address returns that of a pod in a family, in one of the two subnets of the network.
func (n *netSpec) address(ipv6 bool, host int) netip.Prefix {
	subnet := n.number + 10*(host%2)
	if ipv6 {
		return netip.MustParsePrefix(fmt.Sprintf("fd42:%d::%d/64", subnet, host+2))
	}
	return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.%d/24", subnet, host+2))
}

// hasSubnetOf reports whether an address is in a subnet of the network.
func (n *netSpec) hasSubnetOf(a netip.Addr) bool {
	return n.address(a.Is6(), 0).Masked().Contains(a) || n.address(a.Is6(), 1).Masked().Contains(a)
}

// learns reports whether the subnets of its pods are learned from ADDs.
func (n *netSpec) learns() bool { return !n.agent && !n.admin }

// addresses returns those of a pod.
func (n *netSpec) addresses(host int) []netip.Addr {
	all := []netip.Addr{n.address(false, host).Addr()}
	if n.versions[0].IPv6 {
		all = append(all, n.address(true, host).Addr())
	}
	return all
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// newScenario returns the scenario of a seed.
func newScenario(seed uint64) *scenario {
	r := rand.New(rand.NewPCG(seed, 1))
	s := &scenario{seed: seed, legacy: r.IntN(6) == 0, tables: r.IntN(5) > 0, admin: r.IntN(8) == 0, outputs: pick(r, 1, 3, 6)}
	for _, name := range []string{"IP-MASQ-AGENT", "SECOND"}[:1+r.IntN(2)] {
		c := chainSpec{Chain: name, IPv6: r.IntN(2) == 0}
		if r.IntN(2) == 0 {
			if c.Scope = prefixList("10.244.0.0/16"); c.IPv6 {
				c.Scope = append(c.Scope, prefixList("fd42::/16")...)
			}
		}
		s.chains = append(s.chains, s.chain(r, c))
	}
	spaced, sources := r.IntN(2) == 0, map[string]int{}
	of := make([]*chainSpec, 1+r.IntN(3), 4)
	for i := range of {
		s.nets = append(s.nets, netSpec{name: fmt.Sprintf("net%d", i), number: i, admin: s.admin})
	}
	if r.IntN(3) == 0 {
		s.nets, of = append(s.nets, netSpec{name: "agent", agent: true, number: len(of)}), append(of, nil)
	}
	for i := range of {
		of[i] = &s.chains[r.IntN(len(s.chains))]
		sources[of[i].Chain]++
	}
	for i := range s.nets {
		n := &s.nets[i]
		moves := sources[of[i].Chain] == 1 && r.IntN(4) > 0
		for number := range 3 {
			v := &version{net: n, chainSpec: of[i], number: number}
			if moves { // its versions need not agree with anybody
				c := s.chain(r, *of[i])
				if v.chainSpec = &c; r.IntN(3) == 0 {
					c.Chain += "-MOVED"
				}
			}
			some := func(one int, of []netip.Prefix) []netip.Prefix {
				return slices.DeleteFunc(slices.Clone(of), func(p netip.Prefix) bool { return r.IntN(one) > 0 || p.Addr().Is6() && !v.IPv6 })
			}
			v.Exempt, v.Masq = append(v.marks(), some(3, exemptions)...), some(4, exceptions)
			if v.refused = r.IntN(4) == 0; v.refused {
				v.Exempt = append(v.Exempt, refusable)
			}
			if spaced && r.IntN(3) > 0 {
				v.Spaces = []string{pick(r, spaces[1:]...)}
			}
			n.versions = append(n.versions, v)
		}
	}
	if more := rand.New(rand.NewPCG(seed, 4)); !s.admin && more.IntN(4) == 0 {
		s.manage, s.own = true, more.IntN(2) == 0
	}
	s.plan(r)
	return s
}

// chain chooses what a chain may change.
func (s *scenario) chain(r *rand.Rand, c chainSpec) chainSpec {
	c.Backend, c.Guard = pick(r, "", "", "nftables", "nftables", "iptables"), pick(r, "", "", "count", "drop", "drop")
	c.Stale, c.EnforceExempt = pick(r, "", "keep", "reset"), r.IntN(4) == 0
	if !s.tables && c.Backend == "iptables" {
		c.Backend = ""
	}
	if c.Outputs = nil; r.IntN(s.outputs) == 0 {
		c.Outputs = pick(r, prefixList("203.0.113.0/24"), prefixList("198.51.101.0/24 203.0.113.9/32 198.51.100.7/32"))
		if c.IPv6 {
			c.Outputs = append(c.Outputs, prefixList("2001:db8:fffe::/64")...)
		}
	}
	return c
}

// stories are operations that are rarely in this order by chance: on one network, one pod and one version, and those that
// come so many after them.
var stories = [][]op{
	// A network is dropped while an ADD returns, or by a process that is killed.
	{{kind: "conflist"}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "no conflist"}, {kind: "once", wait: true}, {kind: "sleep", number: 7, wait: true}, {kind: "once", event: event{"pause", "kernel: observe", 5}}, {kind: "stale add"}},
	{
		{kind: "conflist"}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "no conflist"}, {kind: "once", wait: true}, {kind: "sleep", number: 7, wait: true},
		{kind: "stale add"}, {kind: "once", event: event{"kill", "rename", 2}}, {kind: "wait"}, {kind: "once", wait: true},
	},
	{
		{kind: "conflist"}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "no conflist"}, {kind: "once", wait: true}, {kind: "sleep", number: 7, wait: true},
		{kind: "stale add", event: event{"pause", "", 1}}, {kind: "once", event: event{"pause", "kernel: remove", 1}}, {kind: "wait"},
	},
	{
		{kind: "conflist"}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "no conflist"}, {kind: "once", wait: true}, {kind: "sleep", number: 7, wait: true},
		{kind: "once", event: event{"pause", "rename", 1}}, {kind: "stale add", event: event{"pause", "kernel: observe", 1}}, {kind: "next", event: event{"kill", "list", 1}}, {kind: "wait"},
		{kind: "once", wait: true},
	},
	// It is not dropped in the first minutes of a boot, nor beside a file that cannot be parsed.
	{{kind: "conflist"}, {kind: "add", wait: true}, {kind: "no conflist"}, {kind: "sleep", number: 7, wait: true}, {kind: "reboot"}, {kind: "once", wait: true}, {kind: "once", wait: true}},
	{{kind: "conflist"}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "no conflist"}, {kind: "bad file", net: 1}, {kind: "sleep", number: 7, wait: true}, {kind: "once", wait: true}, {kind: "once", wait: true}},
	// Another list of namespaces comes into force while an ADD runs.
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "conflist", version: 1}, {kind: "once", event: event{"pause", "kernel: write", 1}},
		{kind: "add", pod: 1, number: 5, event: event{"pause", "create", 1}}, {kind: "wait"},
	},
	{{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "conflist", version: 1}, {kind: "once"}, {kind: "add", pod: 1, number: 5, event: event{"begin", "kernel: write", 0}}, {kind: "wait"}},
	// A policy changes while a part of the kernel or the disk fails.
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "add", net: 1, pod: 1, number: 5, wait: true}, {kind: "conflist", version: 1},
		{kind: "add", pod: 2, number: 5, wait: true, event: event{"fail", "kernel: remove", 1}},
	},
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "add", net: 1, pod: 1, number: 5, wait: true}, {kind: "conflist", version: 1},
		{kind: "add", pod: 2, number: 5, wait: true, event: event{"fail", "kernel: write guards", 2}},
	},
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "add", net: 1, pod: 1, number: 5, wait: true}, {kind: "conflist", version: 1},
		{kind: "add", pod: 2, number: 5, wait: true, event: event{"fail", "kernel: read addresses", 1}},
	},
	{{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "conflist", version: 1}, {kind: "add", pod: 1, number: 4, event: event{"fail", "", 0}, wait: true}},
	// Something happens while a reconciler works.
	{{kind: "add", wait: true}, {kind: "next", event: event{"tamper", "kernel: observe", 0}}, {kind: "commit"}, {kind: "add", number: 4, event: event{"begin", "rename", 1}, wait: true}},
	{{kind: "add", wait: true}, {kind: "next", event: event{"tamper", "rename", 1}}, {kind: "commit"}, {kind: "sleep", number: 4, wait: true}},
	{{kind: "add", wait: true}, {kind: "connect"}, {kind: "connect"}, {kind: "next", event: event{"fail", "kernel: walk", 1}}, {kind: "conflist", version: 1}, {kind: "sleep", number: 6, wait: true}},
	{{kind: "add", wait: true}, {kind: "connect"}, {kind: "connect"}, {kind: "conflist", version: 1}, {kind: "add", event: event{"pause", "kernel: walk", 1}}, {kind: "conflist", version: 2}, {kind: "add", pod: 1, wait: true}},
	// Policies come and go.
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "conflist", version: 1}, {kind: "add", pod: 1, number: 5, wait: true}, {kind: "address"}, {kind: "add", pod: 3, number: 4, wait: true},
		{kind: "conflist"}, {kind: "add", pod: 2, number: 6, wait: true},
	},
	// An address passes to a pod of another namespace.
	{{kind: "add", number: 4, wait: true}, {kind: "connect"}, {kind: "del", number: 7}, {kind: "add", number: 5, wait: true}, {kind: "check"}},
	// The same while the disk is bad, before another list of namespaces.
	{
		{kind: "conflist"}, {kind: "add", number: 4, wait: true}, {kind: "disk read-only"}, {kind: "del", number: 7, wait: true}, {kind: "add", number: 6, wait: true},
		{kind: "disk good"}, {kind: "conflist", version: 1}, {kind: "once", wait: true},
	},
	// The node restarts when all is verified.
	{{kind: "add", wait: true}, {kind: "add", wait: true}, {kind: "reboot"}, {kind: "add", wait: true}},
	// Another program changes rules that are verified, or that are about to be.
	{{kind: "add", wait: true}, {kind: "add", number: 4, wait: true, event: event{"tamper", "kernel: ", 0}}, {kind: "add", number: 4, wait: true}},
	{{kind: "add", wait: true}, {kind: "add", wait: true}, {kind: "tamper"}, {kind: "tamper"}, {kind: "add", wait: true}, {kind: "sleep", number: 4, wait: true}},
	{{kind: "add", wait: true}, {kind: "add", wait: true}, {kind: "sleep", number: 2, wait: true}, {kind: "tamper"}, {kind: "add", wait: true}},
	{{kind: "add", wait: true}, {kind: "tamper", number: 2}, {kind: "connect"}, {kind: "add", wait: true}},
	// Walks fail for a time.
	{{kind: "add", wait: true}, {kind: "connect"}, {kind: "refuse", number: 5}, {kind: "conflist"}, {kind: "add", wait: true}, {kind: "sleep", number: 3, wait: true}, {kind: "accept"}, {kind: "sleep", number: 6, wait: true}},
	// The kernel refuses a policy for a time.
	{{kind: "add", wait: true}, {kind: "refuse"}, {kind: "conflist", version: 1}, {kind: "add", number: 4, wait: true}, {kind: "add", net: 1, pod: 1, number: 4, wait: true}, {kind: "accept"}},
	// Documents are damaged beside others.
	{{kind: "add", wait: true}, {kind: "damage", number: 5}, {kind: "add", net: 1, pod: 1, number: 4, wait: true}},
	{{kind: "add", wait: true}, {kind: "no conflist"}, {kind: "damage", number: 5}, {kind: "once", wait: true}},
}

// plan makes the operations.
func (s *scenario) plan(r *rand.Rand) {
	add := func(o op) { s.ops = append(s.ops, &o) }
	kinds := []string{
		"add", "add", "add", "add", "add", "add", "del", "del", "conflist", "conflist", "once", "gc", "check", "status", "agree",
		"tamper", "commit", "sleep", "stale add", "connect", "connect", "quiet", "wait", "bad file", "address", "no conflist", "next", "next",
	}
	if r.IntN(2) == 0 {
		kinds = append(kinds, "run", "run", "stop", "sleep", "fight")
		add(op{kind: "run"})
	} else {
		kinds = append(kinds, "once")
	}
	if r.IntN(2) == 0 { // a world with disks that fail
		kinds = append(kinds, "disk full", "disk read-only", "disk broken", "disk good", "reboot", "reboot", "damage", "lose", "no conflist", "refuse", "accept")
	}
	// Each scenario lacks many kinds, so that it has more of others.
	kinds = slices.DeleteFunc(kinds, func(kind string) bool { return kind != "add" && r.IntN(2) == 0 })
	// Many have one kind of event at one kind of effects, again and again.
	whats := slices.DeleteFunc([]string{"kill", "fail", "tamper", "pause", "begin"}, func(string) bool { return r.IntN(2) == 0 })
	focus, focused := pick(r, counted...), r.IntN(3) > 0
	hurt := func(o *op) {
		if len(whats) == 0 || o.event.what != "" || o.kind != "next" && (!focused && r.IntN(3) > 0 || r.IntN(2) == 0) {
			return
		}
		o.event = event{pick(r, whats...), focus, 1 + r.IntN(pick(r, 1, 2, 6))}
		if !focused {
			o.event.of = pick(r, counted...)
		}
		if o.event.of == "" || o.event.of == "kernel: " {
			o.event.at = 1 + r.IntN(pick(r, 4, 12, 30))
		}
	}
	if s.manage {
		kinds = append(kinds, "run", "conflist", "conflist", "main", "main", "main")
		add(op{kind: "run"})
	}
	for i := range s.nets {
		add(op{kind: "conflist", net: i, wait: true})
	}
	for range 4 + r.IntN(10) {
		if r.IntN(6) == 0 {
			networks := len(s.nets)
			if s.nets[networks-1].agent {
				networks--
			}
			net, pod, version := r.IntN(networks), r.IntN(most), r.IntN(3)
			for _, o := range pick(r, stories...) {
				o.net, o.pod, o.version = (net+o.net)%networks, (pod+o.pod)%most, (version+o.version)%3
				if o.kind == "tamper" || o.kind == "address" {
					o.number = r.IntN(8)
				}
				if hurt(&o); o.event.what != "" && o.event.at == 0 {
					o.event.at = 1 + r.IntN(8)
				}
				add(o)
			}
		}
		o := op{kind: pick(r, kinds...), net: r.IntN(len(s.nets)), pod: r.IntN(most), version: r.IntN(3), number: r.IntN(8), wait: r.IntN(2) == 0}
		hurt(&o)
		if s.nets[o.net].agent && o.kind != "conflist" && o.kind != "bad file" && o.kind != "damage" {
			o.net = 0
		}
		add(o)
		if strings.HasPrefix(o.kind, "disk ") && r.IntN(2) == 0 {
			add(op{kind: "agree", net: o.net, wait: true})
		}
		if o.event.what != "" && o.kind != "next" && r.IntN(2) == 0 { // the runtime tries again
			o.event, o.wait = event{}, true
			add(o)
		}
	}
	add(op{kind: "quiet", wait: true})
}

func (s *scenario) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, iptables %v (legacy %v), plugin.toml %v, entry_file %v (own conflist %v)\n", s.seed, s.tables, s.legacy, s.admin, s.manage, s.own)
	for i := range s.nets {
		n := &s.nets[i]
		for _, v := range n.versions {
			if slices.ContainsFunc(s.ops, func(o *op) bool { return o.kind == "conflist" && o.net == i && o.version == v.number }) {
				fmt.Fprintf(&b, "%s: %s\n", v, marshal(v))
			}
		}
	}
	for _, o := range s.ops {
		fmt.Fprintf(&b, "  %s\n", o)
	}
	return b.String()
}
