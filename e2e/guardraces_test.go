// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

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
			load := topology.Must(p.StartLoad(loadDestinations()))(t)
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
			report := topology.Must(load.Stop())(t)
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
