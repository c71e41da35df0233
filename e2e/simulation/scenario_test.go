// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
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

	outputs int  // one chain in so many has outputAddresses
	manage  bool // reconcilers manage the conflist of the first network
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
		text = fmt.Sprintf("%s pod%d", o.kind, o.pod)
	case "early":
		text = fmt.Sprintf("%s net%d pod%d", o.kind, o.net, o.pod)
	case "conflist":
		text = fmt.Sprintf("%s net%d/%d", o.kind, o.net, o.version)
	case "gc", "no conflist", "bad file", "status", "agree":
		text = fmt.Sprintf("%s net%d", o.kind, o.net)
	case "damage", "lose":
		text = fmt.Sprintf("%s net%d %d", o.kind, o.net, o.number)
	case "tamper", "fight", "sleep", "address", "clock":
		text = fmt.Sprintf("%s %d", o.kind, o.number)
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
	multicast  = prefixList("224.0.0.0/4 255.255.255.255/32 ff00::/8")
	// destinations has an address for each case of the longest prefix. Those of versions come on top.
	destinations = list(netip.MustParseAddr, "8.8.8.8 10.1.1.1 10.20.1.1 10.20.30.1 10.20.30.65 192.0.2.1 192.0.2.129 172.16.0.1 192.168.1.1 "+
		"169.254.1.1 239.1.1.1 255.255.255.255 198.18.0.1 2001:db8:1::1 fd00:1:1::1 fd00:1:2::1 2001:db8:8::1 ff0e::1")
	spaces = []string{"", "system", "web"}
	// nodeAddresses are those of the node: the first of each family is what MASQUERADE takes, the others come and go.
	nodeAddresses = []policy.NodeAddress{
		{Address: netip.MustParseAddr("198.51.100.7"), Interface: "eth0", Up: true}, {Address: netip.MustParseAddr("2001:db8:ffff::7"), Interface: "eth0", Up: true},
		{Address: netip.MustParseAddr("198.51.101.8"), Interface: "eth0", Up: true}, {Address: netip.MustParseAddr("203.0.113.9"), Interface: "lo", Shared: true, Up: true},
		{Address: netip.MustParseAddr("2001:db8:fffe::7"), Interface: "eth0", Up: true},
	}
)

func list[T any](parse func(string) T, text string) (all []T) {
	for f := range strings.FieldsSeq(text) {
		all = append(all, parse(f))
	}
	return all
}

func prefixList(text string) []netip.Prefix { return list(netip.MustParsePrefix, text) }

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
		s.manage = true
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

// stories are operations that are rarely in this order by chance, in the words that a failure prints. Networks, pods and
// versions (v1) count from the ones that the scenario chooses; without a number, an event happens at one that it chooses.
var stories = readStories(`
# A network is dropped while an ADD returns, or by a process that is killed.
conflist, add, reboot, no conflist, once, sleep 7, once [pause at kernel: observe 5] &, stale add &
conflist, add, reboot, no conflist, once, sleep 7, stale add &, once [kill at rename 2] &, wait, once
conflist, add, reboot, no conflist, once, sleep 7, stale add [pause at write 1] &, once [pause at kernel: remove 1] &, wait
conflist, add, reboot, no conflist, once, sleep 7, once [pause at rename 1] &, stale add [pause at kernel: observe 1] &, next [kill at list 1], wait, once
conflist, add, reboot, no conflist, once, sleep 7, once [fail at kernel: write guards 1]
# It is not dropped in the first minutes of a boot, nor beside a file that cannot be parsed.
conflist, add, no conflist, sleep 7, reboot, once, once
conflist, add, reboot, no conflist, bad file net1, sleep 7, once, once
# Another list of namespaces comes into force while an ADD runs.
conflist, add 4, conflist v1, once [pause at kernel: write 1] &, add pod1 5 [pause at create 1] &, wait
conflist, add 4, conflist v1, once &, add pod1 5 [begin at kernel: write] &, wait
# A policy changes while a part of the kernel or the disk fails.
conflist, add 4, add net1 pod1 5, conflist v1, add pod2 5 [fail at kernel: remove 1]
conflist, add 4, add net1 pod1 5, conflist v1, add pod2 5 [fail at kernel: write guards 2]
conflist, add 4, add net1 pod1 5, conflist v1, add pod2 5 [fail at kernel: read addresses 1]
conflist, add 4, conflist v1, add pod1 4 [fail at write]
disk read-only, agree, disk good, conflist, disk full, agree, disk good
# Something happens while a reconciler works.
run 2 &, conflist, add, sleep 4, add, next [tamper at kernel: ], conflist, add [begin at write /var/lib/cni/ip-masq/sources 1]
run 2 &, conflist, add, sleep 4, next [tamper at kernel: ], conflist, sleep 4
run 2 &, add, connect, connect, next [fail at kernel: walk 1], conflist v1, sleep 6
add, connect, connect, conflist v1, add pod1 6 [pause at kernel: walk 1] &, conflist v2, add pod2 6
# A walk fails, and the next ADDs may not take the node as verified.
add, connect, connect, conflist v1, add pod1 6 [fail at kernel: walk 1], add pod1, sleep 4, add pod1
# Policies come and go.
conflist, add 4, conflist v1, add pod1 5, address, add pod3 4, conflist, add pod2 6
# An address passes to a pod of another namespace.
add 4, connect, del 7 &, add 5, check
# The same while the disk is bad, before another list of namespaces.
conflist, add 4, disk read-only, del 7, add 6, disk good, conflist v1, once
# The node restarts when all is verified.
add, add, reboot, add
# Another program changes rules that are verified, or that are about to be.
add, add 4 [tamper at kernel: ], add 4
add, add, tamper, tamper, add, sleep 4
add, add, sleep 2, tamper, add
add, tamper 2, connect, add
# The wall clock is set while pods run that had no ADD.
clock 1, once, add, clock 4, once, del, clock 6, once
# Walks fail for a time.
add, connect, refuse 5, conflist, add, sleep 3, accept, sleep 6
# The kernel refuses a policy for a time.
add, refuse, conflist v1, add 4, add net1 pod1 4, accept
# Documents are damaged beside others.
add, damage 5, add net1 pod1 4
add, no conflist, damage 5, once
`)

// readStories returns the operations of each story.
func readStories(text string) (all [][]op) {
	operation := regexp.MustCompile(`^([a-z -]+?)(?: net(\d))?(?: pod(\d))?(?: v(\d))?(?: (\d))?(?: \[(\w+) at (.*?)(?: ?(\d+))?\])?( &)?$`)
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		var story []op
		for text := range strings.SplitSeq(line, ", ") {
			m := operation.FindStringSubmatch(text)
			if m[7] == "write" {
				m[7] = ""
			}
			number := func(i int) int {
				n, _ := strconv.Atoi(m[i])
				return n
			}
			story = append(story, op{
				kind: m[1], net: number(2), pod: number(3), version: number(4), number: number(5), wait: m[9] == "",
				event: event{m[6], m[7], number(8)},
			})
		}
		all = append(all, story)
	}
	return all
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
		kinds = append(kinds, "run", "conflist", "conflist", "main", "main", "main", "mesh", "mesh")
		add(op{kind: "run"})
	}
	rarely := rand.New(rand.NewPCG(s.seed, 5))
	if rarely.IntN(3) == 0 { // pods run before the conflists have an entry
		kinds = append(kinds, "clock", "clock")
		for range 1 + rarely.IntN(most) {
			add(op{kind: "early", net: rarely.IntN(len(s.nets)), pod: rarely.IntN(most), number: rarely.IntN(8), wait: true})
		}
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
	fmt.Fprintf(&b, "seed %d, iptables %v (legacy %v), plugin.toml %v, entry_file %v\n", s.seed, s.tables, s.legacy, s.admin, s.manage)
	for _, n := range s.nets {
		for _, v := range n.versions {
			stated := func(o *op) bool { return o.kind == "conflist" && o.net == n.number && o.version == v.number }
			if slices.ContainsFunc(s.ops, stated) {
				fmt.Fprintf(&b, "%s: %s\n", v, marshal(v))
			}
		}
	}
	for _, o := range s.ops {
		fmt.Fprintf(&b, "  %s\n", o)
	}
	return b.String()
}
