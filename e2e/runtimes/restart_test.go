// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// TestRestart stops, kills and restarts the runtime. It checks that pods keep sending with the
// right verdict meanwhile, and end as usual.
func TestRestart(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		n.conflist(t, bridge(), n.entry(prefixes()))
		n.ready(t, true)
		old := n.pod(t, "old")
		args := []string{"load", "5ms"}
		for _, d := range containerd.Destinations() {
			args = append(args, "udp:"+d.To)
		}
		load := topology.Must(old.Run(within(t), "load", containerd.PodImage, args...))(t)
		topology.Must(load.Await(within(t), 20))(t)
		must(t, n.Restart(within(t)))
		middle := n.pod(t, "middle")
		n.firstPackets(t, middle)
		must(t, n.Kill())
		must(t, n.Start(within(t)))
		n.ready(t, true)
		young := n.pod(t, "young")
		n.firstPackets(t, young)
		n.wantAttachments(t, 3)
		n.wantLoad(t, load, old, 100)
		n.end(t, old, middle, young)
		n.wantAttachments(t, 0)
	})
}

// wantLoad compares the packets of a load with the policy.
func (n *criNode) wantLoad(t *testing.T, load *containerd.Container, p *containerd.Pod, atLeast int) {
	t.Helper()
	lines := topology.Must(load.Await(within(t), atLeast))(t)
	for _, line := range lines {
		fields := strings.Fields(line) // time, destination, name, source
		if len(fields) != 4 {
			t.Errorf("load: %s", line)
			continue
		}
		for _, d := range containerd.Destinations() {
			if "udp:"+d.To != fields[1] {
				continue
			}
			source, err := netip.ParseAddrPort(fields[3])
			if err != nil || source.Addr() != d.Source(n.Topology, p.Addrs) {
				t.Errorf("load: %s, want %s", line, d.Source(n.Topology, p.Addrs))
			}
		}
	}
	t.Logf("%d packets", len(lines))
}
