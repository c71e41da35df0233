// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// leaves fails the test unless a host sees this source of UDP and TCP from a sender; "" is the address that
// MASQUERADE takes.
func (n *node) leaves(t *testing.T, from *topology.Host, dst string, by *topology.Host, want string) {
	t.Helper()
	to := netip.AddrPortFrom(netip.MustParseAddr(dst), topology.EchoPort)
	if want == "" {
		want = n.NodeAddr(by, to.Addr()).String()
	}
	for protocol, send := range map[string]func(netip.AddrPort, ...topology.Option) (topology.Seen, error){"udp": from.SendUDP, "tcp": from.SendTCP} {
		seen, err := send(to)
		if err != nil || seen.Source.Addr().String() != want || seen.By != by.Name {
			t.Errorf("%s to %s: from %s at %s, %v; want %s at %s", protocol, dst, seen.Source.Addr(), seen.By, err, want, by.Name)
		}
	}
}

func (n *node) address(t *testing.T, args string) {
	t.Helper()
	n.tool(t, "ip", strings.Fields(args)...)
}

// TestOutputAddress: the address that pods leave with, by each interface and for both families.
func TestOutputAddress(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, a := range []string{
			"198.51.100.7/32 dev outside", "198.51.100.8/32 dev outside", "198.51.101.7/32 dev lan", "198.51.102.7/32 dev lo",
			"2001:db8:100::9/128 dev outside preferred_lft 0", "2001:db8:100::7/128 dev outside",
		} {
			n.address(t, "address add "+a)
		}
		conf := object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "fd00:9::/32"}, "enableIPv6": true, "guard": "drop", "enforceExempt": true}
		add := func(items ...string) (p *pod, stderr string) {
			t.Helper()
			conf["outputAddresses"] = items
			n.conflist(t, "podnet", conf)
			p = n.newPod(t)
			stdout, stderr, code := n.add(t, "podnet", p)
			if code != 0 {
				t.Fatalf("exit code %d\n%s%s", code, stdout, stderr)
			}
			p.addrs = addresses(t, stdout)
			succeeds(t, "CHECK")(n.check(t, "podnet", p))
			return p, stderr
		}
		p, _ := add("198.51.100.0/24", "198.51.101.0/24", "2001:db8:100::/64")
		n.leaves(t, p.Host, "1.2.3.4", n.Outside, "198.51.100.7")
		n.leaves(t, p.Host, "192.168.7.7", n.LAN, "198.51.101.7")
		n.leaves(t, p.Host, "2001:db8:5::5", n.Outside, "2001:db8:100::7")
		n.leaves(t, p.Host, "fd00:7::7", n.LAN, "")
		n.leaves(t, p.Host, "10.9.9.9", n.LAN, p.addr(netip.MustParseAddr("10.9.9.9")).String())
		n.leaves(t, n.Node, "1.2.3.4", n.Outside, "")

		// Services: to an endpoint outside, and from outside to the pod.
		n.tool(t, "nft", "table ip services { chain prerouting { type nat hook prerouting priority -100; "+
			"ip daddr 10.96.0.1 dnat to 5.6.7.8; ip daddr "+n.NodeAddr(n.Outside, netip.IPv4Unspecified()).String()+" udp dport 30007 dnat to "+
			p.addr(netip.IPv4Unspecified()).String()+":7; }; }")
		n.leaves(t, p.Host, "10.96.0.1", n.Outside, "198.51.100.7")
		nodePort := netip.AddrPortFrom(n.NodeAddr(n.Outside, netip.IPv4Unspecified()), 30007)
		if seen, err := n.Outside.SendUDP(nodePort); err != nil || seen.By != p.Name {
			t.Errorf("node port: %+v, %v", seen, err)
		}

		var e struct{ Address, AddressInterface, AddressItem, Interface, Rule string }
		stdout, stderr, _ := n.reconciler(t, "explain", "1.2.3.4", "--from", p.addr(netip.MustParseAddr("1.2.3.4")).String(), "-o", "json")
		if err := json.Unmarshal([]byte(stdout), &e); err != nil || e.Address != "198.51.100.7" || e.AddressInterface != "outside" || e.AddressItem != "198.51.100.0/24" {
			t.Errorf("explain: %+v, %v\n%s", e, err, stderr)
		}
		if e.Interface != "outside" || !strings.Contains(e.Rule, "snat to 198.51.100.7") {
			t.Errorf("explain names the interface %s and the rule %q", e.Interface, e.Rule)
		}
		n.conflist(t, "another", object{"outputAddresses": []string{"198.51.101.0/24", "198.51.100.0/24"}, "enableIPv6": true})
		if _, stderr, code := n.add(t, "another", n.newPod(t)); code == 0 || !strings.Contains(stderr, "outputAddresses") {
			t.Errorf("a conflicting list: exit code %d\n%s", code, stderr)
		}
		must(t, os.Remove(filepath.Join(n.cni.ConfDir, "10-another.conflist")))
		n.address(t, "address del 198.51.100.7/32 dev outside")
		if _, stderr, code := n.check(t, "podnet", p); code == 0 || !strings.Contains(stderr, "198.51.100.8") {
			t.Errorf("CHECK with another address: exit code %d\n%s", code, stderr)
		}
		n.address(t, "address add 198.51.100.7/32 dev outside")

		p, _ = add("198.51.102.7", "198.51.100.8", "2001:db8:100::9") // lo is for all interfaces; a deprecated address that is named
		n.leaves(t, p.Host, "1.2.3.4", n.Outside, "198.51.102.7")
		n.leaves(t, p.Host, "192.168.7.7", n.LAN, "198.51.102.7")
		n.leaves(t, p.Host, "2001:db8:5::5", n.Outside, "2001:db8:100::9")

		conf["toPorts"], conf["masqueradeHost"] = "2000-2100", false
		n.address(t, "address add 198.51.103.1/24 dev outside")
		n.address(t, "address add 198.51.103.2/24 dev outside") // secondary: MASQUERADE never takes it
		p, _ = add("198.51.103.2")
		n.leaves(t, p.Host, "1.2.3.4", n.Outside, "198.51.103.2")
		p, _ = add("198.51.103.0/24") // another list: the lowest address
		n.leaves(t, p.Host, "1.2.3.4", n.Outside, "198.51.103.1")

		p, _ = add("198.51.100.8", "198.51.102.0/24")
		seen := assert.Must(p.SendUDP(netip.MustParseAddrPort("1.2.3.4:7")))(t)
		if seen.Source.Addr().String() != "198.51.100.8" || seen.Source.Port() < 2000 || seen.Source.Port() > 2100 {
			t.Errorf("with ports: %s", seen.Source)
		}
		n.leaves(t, p.Host, "192.168.7.7", n.LAN, "198.51.102.7")

		p, stderr = add("198.18.0.0/15") // no address of the node
		n.leaves(t, p.Host, "1.2.3.4", n.Outside, "")
		wantText(t, "the warnings", stderr, "outputAddresses (198.18.0.0/15)", "198.51.100.7 on outside")
		stdout, _, _ = n.reconciler(t, "status")
		wantText(t, "status", stdout, "  output-address: ")
		if t.Failed() {
			t.Log(n.rules(t))
		}
	})
}

// TestOutputAddressOfOneFamily: a list of both families does not keep a node without IPv4 addresses from being ready.
func TestOutputAddressOfOneFamily(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, device := range []string{"outside", "lan"} {
			n.address(t, "-4 address flush dev "+device)
		}
		n.address(t, "address add 2001:db8:100::7/128 dev outside nodad")
		n.conflist(t, "podnet", object{"enableIPv6": true, "outputAddresses": []string{"198.51.100.0/24", "2001:db8:100::/64"}})
		p := n.pod(t, "podnet") // whose bridge has an IPv4 address
		d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
		n.leaves(t, p.Host, "2001:db8:5::5", n.Outside, "2001:db8:100::7")
		n.wantSays(t, 0, []string{"notice: output-address-no-family", "IP-MASQ-AGENT (ipv4)", "198.51.100.0/24"}, "doctor")
		n.address(t, "address add 198.51.101.7/32 dev outside")
		d.untilUnready(t, "no usable address of the node", "198.51.101.7")
	})
}

// TestOutputAddressLeaves removes the address in force under connections. A reconciler, or without one the next
// ADD, chooses another one; the connections translated to it end, and no others.
func TestOutputAddressLeaves(t *testing.T) {
	t.Parallel()
	for _, f := range backends() {
		for _, running := range []bool{true, false} {
			name := f.name + "/ADD"
			if running {
				name = f.name + "/reconciler"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t, f)
				n.address(t, "address add 198.51.100.7/32 dev outside")
				n.address(t, "address add 198.51.100.8/32 dev outside")
				n.conflist(t, "podnet", object{"outputAddresses": []string{"198.51.100.0/24"}})
				p := n.pod(t, "podnet")
				var d *daemon
				if running {
					d = n.startReconciler(t).untilReady(t)
				}
				translated, exempt := n.open(t, p, "1.2.3.4", flowsPerKind), n.open(t, p, "10.9.9.9", 20)
				inForce := netip.MustParseAddr("198.51.100.7")
				translated.node = func(topology.Seen) netip.Addr { return inForce }
				if o := translated.send(t, true); o != (outcome{}) {
					t.Fatalf("before: %+v", o)
				}
				if running {
					d.until(t, "the connections are counted", func() bool {
						return d.metric(t, "connections_total", "action", "masquerade", "family", "ipv4") >= 2*flowsPerKind
					})
				}
				if running { // removed and added again: nothing changes
					batch := filepath.Join(n.dir, "batch") // of one program: no load of the machine comes between
					must(t, os.WriteFile(batch, []byte("address del 198.51.100.7/32 dev outside\naddress add 198.51.100.7/32 dev outside\n"), 0o600))
					n.tool(t, "ip", "-batch", batch)
					time.Sleep(100 * time.Millisecond)
					if o := translated.send(t, true); o != (outcome{}) {
						t.Errorf("removed and added again: %+v", o)
					}
				}
				n.address(t, "address del 198.51.100.7/32 dev outside")
				inForce = netip.MustParseAddr("198.51.100.8")
				if running {
					d.until(t, "the rule has the other address", func() bool { return strings.Contains(n.rules(t), "198.51.100.8") })
					d.until(t, "connections are reset", func() bool { return !strings.Contains(n.tool(t, "conntrack", "-L"), "dst=198.51.100.7") })
				} else {
					n.pod(t, "podnet")
				}
				if o := translated.send(t, true); o.wrong != 0 || o.moved != flowsPerKind || o.reset != flowsPerKind {
					t.Errorf("translated connections: %+v", o)
				}
				if running && strings.Contains(d.log(), "repaired rules") {
					t.Error("a change of the node's addresses is no drift")
				}
				if o := exempt.send(t, false); o != (outcome{}) {
					t.Errorf("exempt connections: %+v", o)
				}
				n.address(t, "address add 198.51.100.7/32 dev outside") // the one in force stays
				n.pod(t, "podnet")
				if o := translated.send(t, true); o != (outcome{}) {
					t.Errorf("after the address is back: %+v", o)
				}
				if t.Failed() {
					t.Log(n.rules(t))
				}
			})
		}
	}
}
