// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// keyCase is an entry with the expected verdicts: destinations by sender.
type keyCase struct {
	Name                string
	Keys                object
	Exempt, Masqueraded flows
}

type (
	object = map[string]any
	flows  = map[string]string
)

// TestKeys checks which packets each key exempts or masquerades, at the boundaries of its prefixes,
// for both families, UDP and TCP.
func TestKeys(t *testing.T) {
	t.Parallel()
	var cases []keyCase
	file := json.NewDecoder(bytes.NewReader(readFile(t, "testdata/keys.json")))
	file.DisallowUnknownFields()
	must(t, file.Decode(&cases))
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) {
					t.Parallel()
					n := newNode(t, f)
					n.conflist(t, "podnet", c.Keys)
					all := newSenders(t, n, n.pod(t, "podnet"))
					all.verdicts(t, n, false, c.Exempt)
					all.verdicts(t, n, true, c.Masqueraded)
					if t.Failed() {
						t.Log(n.rules(t))
					}
				})
			}
		})
	}
}

// TestKeyMasqLinkLocalIPv6 sends from the node, because link-local packets are not forwarded.
// A masqueraded packet gets the link-local address of the node's interface.
func TestKeyMasqLinkLocalIPv6(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		addAddress(t, n.Node, "lan", vip6)
		to := netip.AddrPortFrom(netip.MustParseAddr("fe80::11%lan"), topology.EchoPort)
		for _, masquerade := range []bool{false, true, false} {
			n.conflist(t, "podnet", object{"masqLinkLocalIPv6": masquerade, "enableIPv6": true})
			n.pod(t, "podnet")
			sent := netip.AddrPortFrom(vip6, n.nextPort())
			seen := assert.Must(n.Node.SendUDP(to, topology.FromAddr(vip6), topology.FromPort(sent.Port())))(t)
			if masquerade == (seen.Source == sent) {
				t.Errorf("masqLinkLocalIPv6 %v: came from %s, was sent from %s", masquerade, seen.Source, sent)
			}
		}
	})
}

// TestIPv6NotTrackedUnlessEnabled checks with conntrack -L that IPv6 flows are tracked only if
// enableIPv6 is set: IPv6 NAT rules enable connection tracking.
func TestIPv6NotTrackedUnlessEnabled(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, managed := range []bool{false, true} {
			n.conflist(t, "podnet", object{"enableIPv6": managed})
			all := onlyPod(n.pod(t, "podnet"))
			all.verdicts(t, n, managed, flows{"pod": "2001:db8:5::5"})
			tracked := n.tool(t, "conntrack", "-L", "-f", "ipv6") != ""
			if tracked != managed {
				t.Errorf("enableIPv6 %v, but flows are tracked: %v", managed, tracked)
			}
		}
	})
}

func onlyPod(p *pod) senders { return senders{"pod": {p.Host, p.addrs}} }

// TestDefaultDataDir checks where the state is if the entry states no dataDir, and that the chain names it.
func TestDefaultDataDir(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", object{"dataDir": nil})
	n.pod(t, "podnet")
	if entries, err := os.ReadDir(n.own("/var/lib/cni/ip-masq")); err != nil || len(entries) == 0 {
		t.Errorf("the dataDir has %v, %v", entries, err)
	}
	wantText(t, "the rules", n.rules(t), "keeps its state in /var/lib/cni/ip-masq\"")
}
