// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"time"

	"golang.org/x/sys/unix"
)

// threadTime returns the processor time of the thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // fails only for unknown clocks
	return time.Duration(t.Nano())
}

// SetGuard makes the table ip-masq-guard dormant, so that the kernel does not evaluate its chains, or
// wakes it.
func (n *Node) SetGuard(awake bool) error {
	flags := "flags dormant;"
	if awake {
		flags = ""
	}
	return n.Feed("add table ip ip-masq-guard { "+flags+" }", "nft", "-f", "-")
}
