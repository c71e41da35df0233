// SPDX-License-Identifier: Apache-2.0

package topology_test

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

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
