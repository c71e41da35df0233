// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

func main() { os.Exit(sandbox.Enter(run)) }

func run() int {
	started := time.Now()
	if err := topology.Run(demo); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		return 1
	}
	fmt.Printf("\nDone in %.1f s. Everything was in namespaces of its own, and they are gone.\n", time.Since(started).Seconds())
	return 0
}

const network = "podnet"

func demo(t topology.T) {
	top := topology.New(t, topology.Options{IsolateOutside: true})
	s := &stage{T: t, ctx: context.Background(), top: top, cni: topology.NewCNI(t, top.Node, "/etc/cni/net.d"), pods: map[string]*pod{}}
	s.withoutUs()
	s.withUs()
	s.changed()
	s.otherBackend()
	s.drift()
	s.end()
}

// Destinations of the pods.
var (
	lanServer = netip.MustParseAddr("10.20.0.5")    //nolint:gochecknoglobals // constants of the scene
	internet  = netip.MustParseAddr("198.51.100.7") //nolint:gochecknoglobals // constants of the scene
)

func (s *stage) withoutUs() {
	s.title("1. A node without ip-masq")
	s.say(`
  pod ──┐        ┌── 192.168.50.10 ── lan      10.20.0.5     routes pod addresses
        ├── node ┤
  pod ──┘        └── 203.0.113.10 ─── outside  198.51.100.7  can answer only the node's address

The conflist has bridge alone. A pod asks both sides.`)
	s.conflist("bridge alone", nil)
	s.startPod("pod-0")
	s.ask("pod-0", lanServer, internet)
}

func (s *stage) withUs() {
	s.title("2. ip-masq, behind bridge in the conflist")
	s.conflist("the entry to add", entry{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}, "backend": "iptables"})
	for _, name := range []string{"pod-1", "pod-2"} {
		s.startPod(name)
	}
	s.ask("pod-1", lanServer, internet, s.pods["pod-2"].addr)
	fmt.Println("The policy applies to pod-0 too, which started before.")
	s.ask("pod-0", lanServer, internet)
	s.show("iptables", "-t", "nat", "-L", "IP-MASQ-AGENT", "-n")
}

func (s *stage) changed() {
	s.title("3. The conflist changes: 10.20.0.0/16 no longer routes pod addresses")
	s.conflist("a masqueraded prefix inside an exempt one: the longest wins", entry{
		"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}, "masqueradeCIDRs": []string{"10.20.0.0/16"}, "backend": "iptables",
	})
	s.say("The next pod brings it into force, for all pods of the node.")
	s.startPod("pod-3")
	s.ask("pod-1", lanServer, internet, s.pods["pod-2"].addr)
	s.show("iptables", "-t", "nat", "-L", "IP-MASQ-AGENT", "-n")
}

func (s *stage) otherBackend() {
	s.title("4. The same in nftables")
	s.conflist("in tables of its own; then it removes the chain from iptables", entry{
		"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}, "masqueradeCIDRs": []string{"10.20.0.0/16"}, "backend": "nftables",
	})
	s.startPod("pod-4")
	s.ask("pod-4", lanServer, internet, s.pods["pod-2"].addr)
	s.show("nft", "list", "table", "ip", "ip-masq")
}

func (s *stage) end() {
	s.title("6. A mistake, and the end")
	s.conflist("host bits in a prefix", entry{"nonMasqueradeCIDRs": []string{"10.0.1.24/24"}})
	s.refused("pod-5")
	for _, name := range s.running() {
		s.stopPod(name)
	}
}
