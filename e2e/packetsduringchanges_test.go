// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

var seed = flag.Uint64("seed", 20260801, "of the random changes")

// TestVerdictsDuringChanges changes the policy with ADDs while a pod opens connections as fast as
// it can, to destinations that every policy exempts and to destinations that no policy exempts. It
// checks that no connection gets the wrong verdict during a change.
func TestVerdictsDuringChanges(t *testing.T) {
	// iptables evaluates its rules one by one, so a long list slows the load down.
	randomPrefixes := map[string]int{"nftables": 400, "iptables-nft": 40, "iptables-legacy": 40}
	onEveryBackend(t, func(t *testing.T, n *node) {
		t.Parallel()
		policy := newChangingPolicy(rand.New(rand.NewPCG(*seed, 1)), randomPrefixes[n.backend.name])
		n.changeUnderLoad(t, 100, 5000, func() object {
			policy.change()
			return policy.entry()
		})
	})
}

// TestVerdictsDuringBackendChange switches the same policy between the two backends.
func TestVerdictsDuringBackendChange(t *testing.T) {
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			policy := newChangingPolicy(rand.New(rand.NewPCG(*seed, 2)), 40)
			backends := []string{"iptables", "nftables"}
			newNode(t, f).changeUnderLoad(t, 20, 1000, func() object {
				keys := policy.entry()
				keys["backend"] = backends[0]
				slices.Reverse(backends)
				return keys
			})
		})
	}
}

// changeUnderLoad runs one ADD after another, each with the next entry, and checks the connections
// that a pod opens meanwhile. It fails if fewer than the minimum were sent during a change.
func (n *node) changeUnderLoad(t *testing.T, changes, fewest int, next func() object) {
	t.Helper()
	t.Logf("-seed %d", *seed)
	n.conflist(t, "podnet", next())
	p := n.pod(t, "podnet")
	adding := n.newPod(t).Path

	began := time.Now()
	load := topology.Must(p.StartLoad(loadDestinations()))(t)
	var spans []span
	for range changes {
		keys := next()
		from := time.Since(began)
		a := n.invoke(t, invocation{verb: "ADD", id: filepath.Base(adding), conf: n.conf(t, "podnet", keys)})
		spans = append(spans, span{from, time.Since(began), describe(keys)})
		if a.exit != 0 {
			t.Errorf("%s: %s\n%s", describe(keys), a.msg, a.stderr)
			break
		}
	}
	report := topology.Must(load.Stop())(t)

	during := n.checkFlows(t, p, report.Flows, spans)
	t.Logf("%d changes in %s; %d connections sent, %d seen, %d of them during a change",
		len(spans), report.Elapsed.Round(time.Millisecond), report.Sent, len(report.Flows), during)
	if during < fewest {
		t.Errorf("%d connections during changes, want at least %d", during, fewest)
	}
}

// span is the time in which a policy was applied, since the start of the load.
type span struct {
	from, to time.Duration
	entry    string
}

// checkFlows checks the source address of each flow and returns how many were sent during a change.
func (n *node) checkFlows(t *testing.T, p *pod, seen []topology.Flow, spans []span) int {
	t.Helper()
	const enough = 5
	during, wrong := 0, 0
	for _, flow := range seen {
		at := spanOf(spans, flow.At)
		if at >= 0 {
			during++
		}
		to := flow.To.Addr()
		own := netip.AddrPortFrom(p.addr(to), flow.From)
		exempt := isAlwaysExempt(to)
		if exempt && flow.Source == own || !exempt && n.isNodeAddr(flow.Source.Addr()) {
			continue
		}
		if wrong++; wrong <= enough {
			when := "between changes"
			if at >= 0 {
				when = fmt.Sprintf("during change %d to %s", at, spans[at].entry)
			}
			t.Errorf("to %s, always exempt %v: came from %s, was sent from %s, %s", to, exempt, flow.Source, own, when)
		}
	}
	if wrong > 0 {
		t.Errorf("%d of %d connections got the wrong verdict", wrong, len(seen))
	}
	return during
}

func (n *node) isNodeAddr(a netip.Addr) bool {
	return a == n.NodeAddr(n.LAN, a) || a == n.NodeAddr(n.Outside, a)
}

func spanOf(spans []span, at time.Duration) int {
	for i, s := range spans {
		if s.from <= at && at <= s.to {
			return i
		}
	}
	return -1
}

// exemptPrefixes contain the destinations that every policy exempts.
var exemptPrefixes = prefixes("10.9.0.0/17", "fd00:9::/64")

// loadDestinations returns thirty destinations in each of two exempt and three other prefixes.
func loadDestinations() []netip.AddrPort {
	var all []netip.AddrPort
	for _, first := range []string{"10.9.0.0", "10.9.127.225", "fd00:9::", "1.2.3.0", "10.77.0.0", "2001:db8:5::"} {
		all = append(all, addrPorts(netip.MustParseAddr(first), 30)...)
	}
	return all
}

func isAlwaysExempt(a netip.Addr) bool {
	return exemptPrefixes[0].Contains(a) || exemptPrefixes[1].Contains(a)
}

func describe(keys object) string {
	text, err := json.Marshal(keys)
	if err != nil {
		return err.Error()
	}
	return string(text)
}
