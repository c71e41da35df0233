// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/aclements/go-moremath/stats"
	"golang.org/x/sys/unix"
)

// Send sends UDP datagrams from the pod through the node to the outside host, which drops them, and
// returns the processor time of one: that of the sending thread, in which the kernel
// also forwards the packet; the median of parts. They belong to one connection, or each opens one, as
// in Flood.
func (n *Node) Send(to netip.Addr, packets int, connections bool) (time.Duration, error) {
	const tries = 5
	for range tries {
		port := func(int) uint16 { return firstPort }
		if connections {
			if err := n.Node.FlushConntrack(); err != nil {
				return 0, err
			}
			port = func(i int) uint16 { return uint16(firstPort + i) }
		}
		_, cpu, missing, err := n.flood(to, packets, port)
		if err != nil {
			return 0, fmt.Errorf("send from a pod: %w", err)
		}
		if missing == 0 {
			return time.Duration(stats.Sample{Xs: cpu}.Quantile(0.5)), nil
		}
	}
	return 0, fmt.Errorf("send to %s: packets were lost in each of %d attempts", to, tries)
}

// threadTime returns the processor time of the thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // fails only for unknown clocks
	return time.Duration(t.Nano())
}

// SetGuard makes the table ip-masq-guard dormant, so that the kernel does not evaluate its chains, or
// wakes it.
func (n *Node) SetGuard(awake bool) error {
	if awake != n.dormant {
		return nil
	}
	flags := "flags dormant;"
	if awake {
		flags = ""
	}
	if err := n.Feed("add table ip ip-masq-guard { "+flags+" }", "nft", "-f", "-"); err != nil {
		return err
	}
	n.dormant = !awake
	return nil
}
