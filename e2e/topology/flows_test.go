// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// destinations returns n destinations in each family.
func destinations(n int) []netip.AddrPort {
	var to []netip.AddrPort
	for _, text := range []string{"20.0.0.1", "10.128.0.1", "2001:db8:20::1", "fd20::1"} {
		a := addr(text)
		for range n / 2 {
			to = append(to, netip.AddrPortFrom(a, topology.EchoPort))
			a = a.Next()
		}
	}
	return to
}

// TestWhatNobodySeesIsAnError sends to an address without a server.
func TestWhatNobodySeesIsAnError(t *testing.T) {
	_, pod := world(t, topology.Options{})
	to := netip.AddrPortFrom(addr("1.2.3.4"), topology.EchoPort+1)
	_, udp := pod.SendUDP(to, topology.Within(20*time.Millisecond))
	_, tcp := pod.SendTCP(to, topology.Within(20*time.Millisecond))
	_, sweep := pod.SweepUDP([]netip.AddrPort{echo("1.2.3.5"), to}, topology.Within(20*time.Millisecond))
	for name, err := range map[string]error{"udp": udp, "tcp": tcp, "sweep": sweep} {
		if err == nil || !strings.Contains(err.Error(), pod.Name) {
			t.Errorf("%s: got %v, want an error with the host's name", name, err)
		}
	}
	if sweep == nil || !strings.Contains(sweep.Error(), "1 of 2 packets") || !strings.Contains(sweep.Error(), to.String()) {
		t.Errorf("sweep: got %v, want the number of lost packets and the first one", sweep)
	}
}

// masquerade has the rules that a policy of this project results in.
const masquerade = `
table inet test {
	chain postrouting {
		type nat hook postrouting priority srcnat
		ip daddr != 10.0.0.0/8 masquerade
		ip6 daddr != fc00::/7 masquerade
	}
}`

func TestMasqueradeIsSeen(t *testing.T) {
	w, pod := world(t, topology.Options{IsolateOutside: true})
	to := destinations(200)
	private := func(a netip.Addr) bool { return a.As16()[0] == 0xfd || a.Is4() && a.As4()[0] == 10 }
	early := topology.Must(w.LAN.OpenTCP(netip.AddrPortFrom(pod.Addrs[0], topology.EchoPort)))(t)
	defer func() { _ = early.Close() }()

	nft := w.Node.Command(t.Context(), "nft", "-f", "-")
	nft.Stdin = strings.NewReader(masquerade)
	if output, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v: %s", err, output)
	}
	want := func(destination netip.Addr) netip.Addr {
		if private(destination) {
			return podAddr(pod, destination)
		}
		return w.NodeAddr(w.Outside, destination)
	}
	for destination, source := range topology.Must(pod.SweepUDP(to))(t) {
		if source.Addr() != want(destination.Addr()) {
			t.Errorf("sweep to %s: seen %s, want %s", destination, source, want(destination.Addr()))
		}
	}
	load := topology.Must(pod.StartLoad(to))(t)
	time.Sleep(100 * time.Millisecond)
	report := topology.Must(load.Stop())(t)
	for _, flow := range report.Flows {
		if flow.Source.Addr() != want(flow.To.Addr()) {
			t.Fatalf("load to %s: seen %s, want %s", flow.To, flow.Source, want(flow.To.Addr()))
		}
	}
	if len(report.Flows) < 100 {
		t.Errorf("load: %d flows of %d were seen", len(report.Flows), report.Sent)
	}
	for _, text := range []string{"198.51.100.1", "2001:db8:ffff::1"} {
		udp := topology.Must(pod.SendUDP(echo(text)))(t)
		tcp := topology.Must(pod.SendTCP(echo(text)))(t)
		if !udp.Answered || udp.Source.Addr() != want(addr(text)) || tcp.Source.Addr() != want(addr(text)) {
			t.Errorf("to %s: seen %v and %v, want an answer to %s", text, udp, tcp, want(addr(text)))
		}
	}
	// Connections from before the rules continue.
	if seen := topology.Must(early.Ask())(t); seen != early.Seen {
		t.Errorf("a connection from before: seen %v, at first %v", seen, early.Seen)
	}
}
