// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Reset is the cost of one reset of stale connections.
type Reset struct {
	CPU       time.Duration
	Allocated uint64 // bytes of memory, at least as many as were in use at once
}

// MeasureReset resets every hundredth of n conntrack entries after a change of one of the prefixes. The stale
// entries are masqueraded and exempt now, or with masqueradedNow the reverse; all others are masqueraded.
func MeasureReset(n int, prefixes []netip.Prefix, masqueradedNow bool) (r Reset, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread and its network namespace end with the goroutine
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			r, err = measureReset(n, prefixes, masqueradedNow)
		}
	}()
	<-done
	return r, err
}

func measureReset(n int, prefixes []netip.Prefix, masqueradedNow bool) (Reset, error) {
	changed := netip.MustParsePrefix("192.0.2.0/24")
	fewer, more := merged(prefixes), merged(append([]netip.Prefix{changed}, prefixes...))
	judge := policy.NewConnectionJudge(more, [][]policy.Policy{fewer}, false)
	if masqueradedNow {
		judge = policy.NewConnectionJudge(fewer, [][]policy.Policy{more}, false)
	}
	err := fixtures.AddConnections(n, func(i int) fixtures.Connection {
		pod := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 88, byte(i >> 7), byte(i & 127)}), uint16(1024+i>>15))
		node := netip.AddrPortFrom(netip.MustParseAddr("203.0.113.1"), uint16(1024+i>>8))
		server := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 443)
		if i%100 == 0 {
			server = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 443)
			if masqueradedNow {
				node = pod
			}
		}
		return fixtures.Connection{Protocol: unix.IPPROTO_UDP, Src: pod, Dst: server, ReplySrc: server, ReplyDst: node}
	})
	if err != nil {
		return Reset{}, err
	}
	runtime.GC()
	var memory, memoryAfter runtime.MemStats
	runtime.ReadMemStats(&memory)
	before, err := cpuTime()
	if err != nil {
		return Reset{}, err
	}
	deleted, err := conntrack.Reset(context.Background(), judge)
	if err != nil {
		return Reset{}, err
	}
	after, err := cpuTime()
	runtime.ReadMemStats(&memoryAfter)
	if got := deleted[policy.ChainFamily{Chain: Chain, Family: policy.IPv4}]; got != uint64(n/100) {
		return Reset{}, fmt.Errorf("%d of %d entries were reset, not 1 %%", got, n)
	}
	return Reset{after - before, memoryAfter.TotalAlloc - memory.TotalAlloc}, err
}

// merged returns the policy of a network with pods 10.88.0.0/16 that exempts the prefixes.
func merged(exempt []netip.Prefix) []policy.Policy {
	return policy.Merge([]policy.Source{{ID: policy.SourceID{Kind: policy.Network, Name: "podnet"}, Policy: policy.SourcePolicy{
		Chain: Chain, PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.88.0.0/16")}, StaleConnections: policy.ResetConnections,
		NonMasqueradeCIDRs: exempt,
	}}})
}

// cpuTime returns the CPU time of the process, the kernel's included.
func cpuTime() (time.Duration, error) {
	var usage unix.Rusage
	err := unix.Getrusage(unix.RUSAGE_SELF, &usage)
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano()), err
}
