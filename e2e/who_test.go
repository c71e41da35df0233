// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// whoConnection is what the command who prints about a connection, as far as tests compare it.
type whoConnection struct {
	Protocol, Source, Destination, Endpoint, Chain, Verdict string
	SourcePort, DestinationPort                             uint16
	SourceLocal, Translated                                 bool
}

// who asks which connections leave with an address and port.
func (n *node) who(t *testing.T, args ...string) []whoConnection {
	t.Helper()
	stdout, stderr, code := n.byHand(t, append([]string{"who", "-o", "json"}, args...)...)
	var answer struct{ Connections []whoConnection }
	if err := json.Unmarshal([]byte(stdout), &answer); err != nil || code != min(1, max(0, 1-len(answer.Connections))) {
		t.Fatalf("who %v: exit code %d, %v\n%s%s", args, code, err, stdout, stderr)
	}
	return answer.Connections
}

// TestWho: a pod and the node have connections that are masqueraded, exempt and those of a Service. Whatever a receiver
// sees, who names the source, the destination and the chain.
func TestWho(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.feed(t, `table ip services { chain prerouting { type nat hook prerouting priority dstnat; ip daddr 10.96.0.1 dnat to 203.0.113.7; }; }`, "nft", "-f", "-")
		n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"192.168.0.0/16", "2001:db8:2::/48"}})
		p, none := n.pod(t, "podnet"), netip.Addr{}
		for _, flow := range []struct {
			to, endpoint, verdict string
			fromNode              bool
		}{
			{to: "203.0.113.5", verdict: "masquerade"}, {to: "192.168.9.9", verdict: "exempt"},
			{to: "10.96.0.1", endpoint: "203.0.113.7", verdict: "masquerade"},
			{to: "2001:db8:1::5", verdict: "masquerade"}, {to: "2001:db8:2::5", verdict: "exempt"},
			{to: "203.0.113.6", verdict: "masquerade", fromNode: true},
		} {
			to := netip.AddrPortFrom(netip.MustParseAddr(flow.to), topology.EchoPort)
			from, address := p.Host, p.addr(to.Addr())
			if flow.fromNode {
				from, address = n.Node, none
			}
			port := n.nextPort()
			udp := topology.Must(from.SendUDP(to, topology.FromPort(port)))(t)
			conn := topology.Must(from.OpenTCP(to, topology.FromPort(port)))(t)
			for protocol, seen := range map[string]topology.Seen{"udp": udp, "tcp": conn.Seen} {
				if !address.IsValid() {
					address = seen.Source.Addr()
				}
				want := []whoConnection{{
					Protocol: protocol, Source: address.String(), SourcePort: port, Destination: flow.to, DestinationPort: to.Port(),
					Endpoint: flow.to, Chain: "IP-MASQ-AGENT", Verdict: flow.verdict, SourceLocal: flow.fromNode,
					Translated: seen.Source != netip.AddrPortFrom(address, port),
				}}
				if flow.endpoint != "" {
					want[0].Endpoint = flow.endpoint
				}
				if !flow.fromNode && want[0].Translated != (flow.verdict == "masquerade") {
					t.Errorf("to %s: seen %s", flow.to, seen.Source)
				}
				at := seen.Source.String()
				for _, args := range [][]string{{at, "--protocol", protocol}, {at, "--protocol", protocol, "--to", want[0].Endpoint}, {at, "--protocol", protocol, "--to", flow.to}} {
					if diff := cmp.Diff(want, n.who(t, args...)); diff != "" {
						t.Errorf("who %v (-want +got):\n%s", args, diff)
					}
				}
				if all := n.who(t, at); len(all) == 0 || len(all) > 2 || all[0] != want[0] && all[len(all)-1] != want[0] {
					t.Errorf("who %s: %+v", at, all)
				}
			}
			must(t, conn.Close())
		}
		gone := "203.0.113.99:9"
		if found := n.who(t, gone); len(found) > 0 {
			t.Errorf("who %s: %+v", gone, found)
		}
		stdout, stderr, code := n.byHand(t, "who", gone)
		if code != 1 || stdout != "" || !strings.Contains(stderr, "no connection leaves with "+gone) {
			t.Errorf("who %s: exit code %d\n%s%s", gone, code, stdout, stderr)
		}
		seen := topology.Must(p.SendUDP(netip.AddrPortFrom(netip.MustParseAddr("203.0.113.5"), topology.EchoPort), topology.FromPort(999)))(t)
		stdout, stderr, code = n.byHand(t, "who", seen.Source.String(), "--to", "203.0.113.5", "--protocol", "udp")
		want := fmt.Sprintf("udp %s:999 to 203.0.113.5:%d\n  chain    IP-MASQ-AGENT, masqueraded\n", p.addr(netip.IPv4Unspecified()), topology.EchoPort)
		if code != 0 || stdout != want {
			t.Errorf("who %s: exit code %d\n%s%s", seen.Source, code, stdout, stderr)
		}
	})
}
