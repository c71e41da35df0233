// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// packetsPerKind is the number of packets of each kind in each family, all from different ports.
const packetsPerKind = 50

// packetKind is a kind of packets that a pod sends to a masqueraded destination.
type packetKind struct {
	name string
	// opened is whether a TCP connection is opened before. Its client's first sequence number is
	// clientSequence, its server's serverSequence.
	opened bool
	// forgotten is whether conntrack then forgets it.
	forgotten bool
	packet    func(pod, to netip.AddrPort) []byte
	// masqueraded kinds get the node's address from NAT; the others leave with the pod's address
	// without a guard.
	masqueraded bool
}

const clientSequence, serverSequence = 1000, 5000

// tcp returns a function that makes a segment with these flags. The numbers are relative to those
// of the connection's next segment.
func tcp(flags byte, sequence, acknowledged uint32) func(pod, to netip.AddrPort) []byte {
	return func(pod, to netip.AddrPort) []byte {
		return tcpSegment(pod, to, flags, clientSequence+1+sequence, serverSequence+1+acknowledged)
	}
}

func packetKinds() []packetKind {
	const window = 1 << 20 // more than a connection's window
	return []packetKind{
		{name: "SYN", packet: tcp(syn, 0, 0), masqueraded: true},
		{name: "UDP", packet: udpDatagram, masqueraded: true},
		{name: "data", opened: true, packet: tcp(ack, 0, 0), masqueraded: true},
		{name: "old data", opened: true, packet: func(pod, to netip.AddrPort) []byte {
			return tcpSegment(pod, to, ack, clientSequence-5, serverSequence+1)
		}, masqueraded: true},
		{name: "FIN", opened: true, packet: tcp(fin|ack, 0, 0), masqueraded: true},
		{name: "GRE", packet: func(pod, to netip.AddrPort) []byte {
			return ipPacket(pod.Addr(), to.Addr(), 47, []byte{0, 0, 0x88, 0xbe, 0, 0, 0, 0})
		}, masqueraded: true},
		{name: "data after the entry is deleted", opened: true, forgotten: true, packet: tcp(ack, 0, 0), masqueraded: true},

		{name: "late FIN", opened: true, forgotten: true, packet: tcp(fin|ack, 0, 0)},
		{name: "late RST", opened: true, forgotten: true, packet: tcp(rst, 0, 0)},
		{name: "late RST with ACK", opened: true, forgotten: true, packet: tcp(rst|ack, 0, 0)},
		{name: "sequence number above the window", opened: true, packet: tcp(ack, window, 0)},
		{name: "acknowledgement above the window", opened: true, packet: tcp(ack, 0, window)},
		{name: "RST out of the window", opened: true, packet: tcp(rst, window, 0)},
		{name: "bad checksum", packet: func(pod, to netip.AddrPort) []byte { return badChecksum(tcp(syn, 0, 0)(pod, to)) }},
		{name: "bad checksum in a connection", opened: true, packet: func(pod, to netip.AddrPort) []byte { return badChecksum(tcp(ack, 0, 0)(pod, to)) }},
		{name: "SYN with FIN", packet: tcp(syn|fin, 0, 0)},
		{name: "unsolicited SYN with ACK", packet: tcp(syn|ack, 0, 0)},
		{name: "unsolicited echo reply", packet: echoReply},
		{name: "ICMP error of an unknown flow", packet: portUnreachable},
		{name: "not tracked", packet: func(pod, to netip.AddrPort) []byte {
			return udpDatagram(pod, netip.AddrPortFrom(to.Addr(), notrackPort))
		}},
	}
}

// notrackPort is a destination port to which packets are not tracked.
const notrackPort = 9999

// TestGuardWrongPackets sends packets that skip NAT although the rules are right. With guard count
// all that leave with the pod's address are counted, with drop none leaves.
func TestGuardWrongPackets(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.feed(t, fmt.Sprintf("table inet other {\nchain prerouting { type filter hook prerouting priority raw; udp dport %d notrack; }\n}\n", notrackPort), "nft", "-f", "-")
		keys := object{"enableIPv6": true, "randomFully": false, "guard": "count"}
		n.conflist(t, "podnet", keys)
		p := n.pod(t, "podnet")
		outside, inside := n.countPackets(t, n.Outside), n.countPackets(t, p.Host)
		loose := packetKind{name: "data after the entry is deleted, tcp_loose 0", opened: true, forgotten: true, packet: tcp(ack, 0, 0)}
		d := n.startReconciler(t).untilReady(t)
		for _, mode := range []string{"count", "drop"} {
			keys["guard"] = mode
			n.conflist(t, "podnet", keys)
			n.pod(t, "podnet")
			wrong := n.sendKinds(t, p, mode, outside, inside, packetKinds())
			must(t, n.Node.Sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"))
			wrong += n.sendKinds(t, p, mode, outside, inside, []packetKind{loose})
			must(t, n.Node.Sysctl("net/netfilter/nf_conntrack_tcp_loose", "1"))
			d.signal(t, syscall.SIGHUP)
			d.until(t, fmt.Sprintf("metric with %d packets", wrong), func() bool {
				return d.metric(t, "guard_packets_total", `action="`+mode+`"`) == float64(wrong)
			})
		}
	})
}

// sendKinds sends packets of each kind to an address of its own in both families and compares the
// source addresses that the outside host sees, and the guard's counters. It returns the number of
// packets that are wrong without a guard.
func (n *node) sendKinds(t *testing.T, p *pod, mode string, outside, inside packetCounters, kinds []packetKind) (wrong int) {
	t.Helper()
	// The ports of NAT are those of the pod, because the destinations differ.
	var requests, answers, confirmations, packets [2][][]byte // of forgotten connections; of others
	var destinations [][2]netip.Addr                          // by kind
	for i, k := range kinds {
		destinations = append(destinations, [2]netip.Addr{nth(silentDestinations[0], i+1), nth(silentDestinations[1], i+1)})
		for j := range packetsPerKind {
			n.ports++
			for _, address := range destinations[i] {
				pod, to := netip.AddrPortFrom(p.addr(address), 30000+n.ports), netip.AddrPortFrom(address, uint16(1000+j))
				when := 1
				if k.forgotten {
					when = 0
				}
				if k.opened {
					node := netip.AddrPortFrom(n.NodeAddr(n.Outside, address), pod.Port())
					requests[when] = append(requests[when], tcpSegment(pod, to, syn, clientSequence, 0))
					answers[when] = append(answers[when], tcpSegment(to, node, syn|ack, serverSequence, clientSequence+1))
					confirmations[when] = append(confirmations[when], tcpSegment(pod, to, ack, clientSequence+1, serverSequence+1))
				}
				packets[1] = append(packets[1], k.packet(pod, to))
				if !k.masqueraded {
					wrong++
				}
			}
		}
	}
	before := n.guardPackets(t)
	for when := range requests {
		must(t, n.Node.FlushConntrack())
		outside.exchange(t, p.Host, requests[when])
		inside.exchange(t, n.Outside, answers[when])
		outside.exchange(t, p.Host, confirmations[when])
	}
	outside.reset(t)
	inject(t, p.Host, packets[1]...)

	arriving := len(packets[1])
	if mode == "drop" {
		arriving -= wrong
	}
	n.await(t, fmt.Sprintf("%d packets, %d of them wrong", arriving, wrong), func() bool {
		return n.guardPackets(t)-before >= wrong && outside.total(t) >= arriving
	})
	wantSame(t, "packets that guard "+mode+" counted", n.guardPackets(t)-before, wrong)
	received := outside.received(t)
	for i, k := range kinds {
		for _, to := range destinations[i] {
			want := [2]int{packetsPerKind, 0}
			switch {
			case k.masqueraded:
				want = [2]int{0, packetsPerKind}
			case mode == "drop":
				want = [2]int{}
			}
			if got := [2]int{received[[2]netip.Addr{p.addr(to), to}], received[[2]netip.Addr{n.NodeAddr(n.Outside, to), to}]}; got != want {
				t.Errorf("guard %s: %s to %s: %d packets came from the pod's address and %d from the node's, want %d and %d",
					mode, k.name, to, got[0], got[1], want[0], want[1])
			}
		}
	}
	return wrong
}

// nth returns the address after n others.
func nth(a netip.Addr, n int) netip.Addr {
	for range n {
		a = a.Next()
	}
	return a
}

// exchange sends packets and waits until the host has received them all.
func (c packetCounters) exchange(t *testing.T, from *topology.Host, packets [][]byte) {
	t.Helper()
	c.reset(t)
	inject(t, from, packets...)
	c.n.await(t, fmt.Sprintf("%d packets at %s", len(packets), c.host.Name), func() bool { return c.total(t) >= len(packets) })
}

// awaitEarlier waits until the host has received what a pod sent to silent destinations before: a
// datagram that the guard passes arrives after it.
func (c packetCounters) awaitEarlier(t *testing.T, p *pod) {
	t.Helper()
	for _, d := range silentDestinations {
		to := nth(d, 250)
		arrived := func() (packets int) {
			for flow, count := range c.received(t) {
				if flow[1] == to {
					packets += count
				}
			}
			return packets
		}
		before := arrived()
		const again = time.Second // the queues of a slow machine are full and drop it
		var sent time.Time
		c.n.await(t, "last datagram", func() bool {
			if time.Since(sent) > again {
				inject(t, p.Host, udpDatagram(netip.AddrPortFrom(p.addr(to), c.n.nextPort()), netip.AddrPortFrom(to, 999)))
				sent = time.Now()
			}
			return arrived() > before
		})
	}
}

// total returns the number of packets from or to the silent destinations.
func (c packetCounters) total(t *testing.T) int {
	t.Helper()
	total := 0
	for flow, packets := range c.received(t) {
		if isSilent(flow[0]) || isSilent(flow[1]) {
			total += packets
		}
	}
	return total
}

func isSilent(a netip.Addr) bool {
	for _, s := range append(silentDestinations, silentExemptDestinations...) {
		if bits := map[bool]int{true: 24, false: 64}[s.Is4()]; netip.PrefixFrom(s, bits).Contains(a) {
			return true
		}
	}
	return false
}

// await waits for a condition. If it does not hold after timelimit.Wait, the test fails and goes on.
func (n *node) await(t *testing.T, what string, is func() bool) {
	t.Helper()
	if !timelimit.Await(timelimit.Wait, is) {
		t.Errorf("no %s", what)
	}
}

// guardPackets returns the number of packets that the guard counted in both families.
func (n *node) guardPackets(t *testing.T) int {
	t.Helper()
	counter, total := regexp.MustCompile(`counter packets (\d+)`), 0
	for _, f := range families() {
		for _, m := range counter.FindAllStringSubmatch(n.tool(t, "nft", "list", "chain", f[1], "ip-masq-guard", "guard-IP-MASQ-AGENT"), -1) {
			packets := assert.Must(strconv.Atoi(m[1]))(t)
			total += packets
		}
	}
	return total
}

// TestGuardDuringRemovals removes the rules again and again while the reconciler repairs them and a
// pod opens flows. No flow arrives with a wrong source; the first packets of some are dropped.
func TestGuardDuringRemovals(t *testing.T) {
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, f)
			n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.9.0.0/16", "fd00:9::/32"}, "guard": "drop"})
			p := n.pod(t, "podnet")
			d := n.startReconciler(t).untilReady(t)
			load := assert.Must(p.StartLoad(loadDestinations()))(t)
			const removals = 10
			for range removals {
				for _, family := range families() {
					if f.variant == "" {
						_, _, _ = run(t, n.Node.Command(n.timeout(t), "nft", "delete", "table", family[1], "ip-masq")) // may be missing still
					} else {
						n.tool(t, family[0], "-t", "nat", "-F")
					}
				}
				time.Sleep(3 * time.Second / removals)
			}
			report := assert.Must(load.Stop())(t)
			n.checkFlows(t, p, report.Flows, nil)
			const fewest = 3000
			t.Logf("%d connections sent, %d seen, %d packets dropped by the guard", report.Sent, len(report.Flows), n.guardPackets(t))
			if len(report.Flows) < fewest {
				t.Errorf("%d connections seen, want at least %d", len(report.Flows), fewest)
			}
			d.untilReady(t)
			n.tool(t, "nft", "flush", "ruleset")
			d.until(t, "repair", func() bool {
				return strings.Contains(n.ruleset(t), "counter drop") && strings.Contains(strings.ToLower(n.rules(t)), "masquerade")
			})
			d.untilReady(t)
			onlyPod(p).verdicts(t, n, true, map[string]string{"pod": "1.2.3.4 2001:db8:5::4"})
			onlyPod(p).verdicts(t, n, false, map[string]string{"pod": "10.9.9.9 fd00:9::9"})
		})
	}
}

// TestGuardAtBoot attaches a pod that sends before the rules exist, as after a reboot. Other
// programs use conntrack, so that its flows are known and not translated. Once ADD has returned no
// packet has a wrong source, and the flows go on.
func TestGuardAtBoot(t *testing.T) {
	for _, f := range backends()[:2] {
		for _, before := range []string{"new node", "reboot"} {
			t.Run(f.name+", "+before, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, f)
				keys := object{"enableIPv6": true, "randomFully": false, "guard": "drop"}
				if before == "reboot" {
					n.conflist(t, "podnet", keys)
					n.pod(t, "podnet")
					n.tool(t, "nft", "flush", "ruleset")
					n.endBoot(t)
				}
				n.feed(t, "table inet other {\nchain forward { type filter hook forward priority 0; ct state invalid counter; }\n}\n", "nft", "-f", "-")
				n.write(t, "podnet", n.bridge("podnet"))
				p := n.pod(t, "podnet")
				outside := n.countPackets(t, n.Outside)
				n.countPackets(t, p.Host)
				var flows [][]byte
				for i := range uint16(packetsPerKind) {
					for _, to := range silentDestinations {
						from, to := netip.AddrPortFrom(p.addr(to), 20000+i), netip.AddrPortFrom(to, 999)
						flows = append(flows, udpDatagram(from, to), tcp(ack, 0, 0)(from, to))
					}
				}
				sends := sendRepeatedly(t, p.Host, flows)
				outsideOf := func(node bool) (packets int) {
					for flow, count := range outside.received(t) {
						if isSilent(flow[1]) && slices.Contains(p.addrs, flow[0]) != node {
							packets += count
						}
					}
					return packets
				}
				n.await(t, "packets from the pod", func() bool { return outsideOf(false) > len(flows) })
				keys["prevResult"] = object{
					"cniVersion": "1.1.0",
					"interfaces": []object{{"name": "eth0", "sandbox": p.Path}},
					"ips":        []object{{"address": p.addrs[0].String() + "/16", "interface": 0}, {"address": p.addrs[1].String() + "/64", "interface": 0}},
				}
				n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", keys), id: p.Path[len("/run/netns/"):]}).want(t, 0)
				sends.pause(func() {
					outside.awaitEarlier(t, p)
					outside.reset(t)
				})
				n.await(t, "packets from the node", func() bool { return outsideOf(true) > 5*len(flows) })
				if wrong := outsideOf(false); wrong > 0 {
					t.Errorf("%d packets came from the pod's address, %d from the node's", wrong, outsideOf(true))
				}
			})
		}
	}
}

// repeatedly sends packets until the test ends.
type repeatedly struct {
	mu sync.Mutex
}

func sendRepeatedly(t *testing.T, h *topology.Host, packets [][]byte) *repeatedly {
	t.Helper()
	r, stop, done := &repeatedly{}, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
				r.mu.Lock()
				err := sendPackets(h, packets)
				r.mu.Unlock()
				if err != nil {
					t.Error(fmt.Errorf("send: %w", err))
					return
				}
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-done
	})
	return r
}

// pause calls a function while nothing is sent.
func (r *repeatedly) pause(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// guardTables returns the tables ip-masq-guard, without counters; "" if there are none.
func (n *node) guardTables(t *testing.T) string {
	t.Helper()
	var all string
	for table := range strings.SplitSeq(n.tool(t, "nft", "-s", "list", "ruleset"), "\n}\n") {
		if strings.Contains(table, " ip-masq-guard {\n") {
			all += table + "\n}\n"
		}
	}
	return all
}

// wantGuardTables fails the test unless the guard tables have all of these, or there are none without.
func (n *node) wantGuardTables(t *testing.T, says ...string) {
	t.Helper()
	tables := n.guardTables(t)
	if len(says) == 0 && tables != "" {
		t.Errorf("guard tables:\n%s", tables)
	}
	wantText(t, "the guard tables", tables, says...)
}

// TestGuardTables follows the guard tables from the ADD that creates them to the one that removes them.
func TestGuardTables(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := func(keys object) string { return n.conf(t, "podnet", dualStack(keys)) }
		n.addAndCheck(t, conf(nil)).noWarnings(t)
		n.wantGuardTables(t)
		drop := conf(object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16", "fd00:1::/64"}, "enforceExempt": true, "staleConnections": "keep"})
		n.invoke(t, invocation{verb: "STATUS", conf: drop}).want(t, 0)
		n.wantGuardTables(t)
		n.addAndCheck(t, drop).noWarnings(t)
		n.wantGuardTables(t, "table ip ip-masq-guard", "table ip6 ip-masq-guard", "10.1.0.0/16", "fd00:1::/64", "drop", "snat to ip saddr")
		rules := func() string { // nft lists objects in the order of their creation
			return strings.Join(slices.Sorted(strings.Lines(n.ruleset(t))), "")
		}
		before := rules()
		n.addAndCheck(t, drop) // writes the verification cache
		wantSame(t, "rules after an ADD with nothing to do", rules(), before)
		for _, script := range []string{
			"delete table ip ip-masq-guard", "flush chain ip6 ip-masq-guard guard-IP-MASQ-AGENT",
			"add element ip ip-masq-guard exempt-IP-MASQ-AGENT { 192.0.2.0/24 }", "add table ip ip-masq-guard { flags dormant; }",
		} {
			n.feed(t, script, "nft", "-f", "-")
			n.invoke(t, invocation{verb: "CHECK", conf: drop}).want(t, 101)
			n.addAndCheck(t, drop).noWarnings(t)
			wantSame(t, "rules repaired after "+script, rules(), before)
			n.feed(t, script, "nft", "-f", "-")
			n.invoke(t, invocation{verb: "DEL", conf: drop, id: "none"}).want(t, 0).noWarnings(t)
			n.invoke(t, invocation{verb: "CHECK", conf: drop}).want(t, 0)
		}
		// The policy changes, and the pods' range.
		n.addAndCheck(t, conf(object{"guard": "drop", "sourceCIDRs": []string{"10.1.0.0/17", "fd00:1::/65"}, "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}, "staleConnections": "keep"})).noWarnings(t)
		n.wantGuardTables(t, "10.1.0.0/17", "192.0.2.0/24", "drop")
		n.addAndCheck(t, conf(object{"guard": "count", "masqChain": "OTHER"})).want(t, 0, "chain OTHER (ipv6)", "podCIDRs")
		n.wantGuardTables(t, "guard-OTHER", "10.1.0.0/16")
		if tables := n.guardTables(t); strings.Contains(tables, "drop") || strings.Contains(tables, "IP-MASQ-AGENT") {
			t.Errorf("guard tables:\n%s", tables)
		}
		n.addAndCheck(t, conf(nil))
		n.wantGuardTables(t)
		// Cleanup, after which nothing returns.
		n.addAndCheck(t, drop)
		if out := n.cleanup(t); !strings.HasPrefix(out, "removed chain guard-IP-MASQ-AGENT (ipv4) from nftables\n") {
			t.Errorf("cleanup does not remove the guard first:\n%s", out)
		}
		n.wantGuardTables(t)
		n.invoke(t, invocation{verb: "DEL", conf: drop}).want(t, 0)
		n.wantGuardTables(t)
	})
}
