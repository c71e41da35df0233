// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
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
	load := assert.Must(p.StartLoad(loadDestinations()))(t)
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
	report := assert.Must(load.Stop())(t)

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
		exempt := exemptPrefixes[0].Contains(to) || exemptPrefixes[1].Contains(to)
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

func describe(keys object) string {
	text, err := json.Marshal(keys)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// changingPolicy is a policy that changes at random. It always exempts exemptOnes, and never the
// other destinations of the load. One of these, 10.77.0.0/24, is within a prefix that is exempt
// most of the time.
type changingPolicy struct {
	random     *rand.Rand
	choices    []keyChoice
	chosen     []int
	exempt     map[string]bool // prefixes without load that are added and removed
	masquerade map[string]bool
}

// keyChoice is a key, or several keys that change together, with the values to choose from.
type keyChoice struct {
	weight int
	values []object
}

// newChangingPolicy returns a policy with about twice size prefixes that the load does not use.
func newChangingPolicy(r *rand.Rand, size int) *changingPolicy {
	lists := func(key string, values ...[]string) (all []object) {
		for _, v := range values {
			all = append(all, object{key: v})
		}
		return append(all, object{})
	}
	c := &changingPolicy{random: r, exempt: map[string]bool{}, masquerade: map[string]bool{}, choices: []keyChoice{
		// Prefixes that cover the destinations that are always exempt.
		{3, lists("exempt4", []string{"10.0.0.0/8"}, []string{"10.9.0.0/16"}, []string{"10.9.0.0/17"}, []string{"10.8.0.0/13", "10.64.0.0/10"},
			[]string{"10.9.0.0/18", "10.9.64.0/18"}, []string{"8.0.0.0/5", "10.0.0.0/9"}, []string{"0.0.0.0/0"})[:7]},
		{2, lists("exempt6", []string{"fd00::/8"}, []string{"fd00:9::/64"}, []string{"fd00:9::/65", "fd00:9:0:0:8000::/65"}, []string{"fc00::/6"})[:4]},
		// Prefixes that cover the other destinations.
		{1, lists("masquerade4", []string{"10.77.0.0/24", "1.2.3.0/24"}, []string{"10.77.0.0/16", "1.0.0.0/8"}, []string{"10.77.0.0/25", "10.77.0.128/25", "1.2.0.0/16"})[:3]},
		{2, lists("sourceCIDRs", []string{"10.1.0.0/16", "fd00:1::/64"}, []string{"10.1.0.0/16", "172.20.0.0/16", "fd00::/16"}, []string{"0.0.0.0/0", "::/0"})},
		{1, lists("nonMasqueradeSourceCIDRs", []string{"172.20.0.0/16"}, []string{"172.20.0.0/16", "100.64.0.0/10", "fd00:77::/64"})},
		{1, lists("outputInterfaces", []string{"lan", "outside"}, []string{"l+", "outside"}, []string{"eth9", "lan", "out+"})},
		{1, []object{{}, {"masqueradeHost": false}}},
		{1, []object{{}, {"randomFully": false}}},
		{1, []object{{}, {"toPorts": "20000-59999"}, {"toPorts": "1024-29999,32768-65535"}}},
		{1, []object{{}, {"masqLinkLocal": true}, {"masqLinkLocalIPv6": true}}},
		{3, []object{{}, {"masqChain": "OTHER"}}},
	}}
	c.chosen = make([]int, len(c.choices))
	// Start with many prefixes: the more there are, the longer the kernel takes to switch.
	for range size {
		c.toggleRandomPrefixes()
	}
	return c
}

// change changes prefixes without load, one choice, or everything.
func (c *changingPolicy) change() {
	switch kind := c.random.IntN(10); {
	case kind < 3:
		c.toggleRandomPrefixes()
	case kind < 7:
		c.changeKey()
	default:
		for i, a := range c.choices {
			c.chosen[i] = c.random.IntN(len(a.values))
		}
		c.toggleRandomPrefixes()
	}
}

// changeKey chooses another value for one key.
func (c *changingPolicy) changeKey() {
	total := 0
	for _, a := range c.choices {
		total += a.weight
	}
	at := c.random.IntN(total)
	for i, a := range c.choices {
		if at -= a.weight; at < 0 {
			step := 1 + c.random.IntN(len(a.values)-1) // never the same value
			c.chosen[i] = (c.chosen[i] + step) % len(a.values)
			return
		}
	}
}

// toggleRandomPrefixes adds and removes a few prefixes that the load does not use.
func (c *changingPolicy) toggleRandomPrefixes() {
	for range 1 + c.random.IntN(8) {
		x, y := c.random.IntN(100), c.random.IntN(4)
		switch c.random.IntN(3) {
		case 0:
			toggle(c.exempt, fmt.Sprintf("20.%d.%d.0/%d", x, 64*y, 18+c.random.IntN(7)))
		case 1:
			toggle(c.exempt, fmt.Sprintf("2001:db8:1%02d:%d::/64", x, y))
		default:
			toggle(c.masquerade, fmt.Sprintf("10.9.%d.0/24", 128+(4*x+y)%128))
		}
	}
}

func toggle(set map[string]bool, key string) {
	if set[key] {
		delete(set, key)
	} else {
		set[key] = true
	}
}

// entry returns the keys of the current policy.
func (c *changingPolicy) entry() object {
	keys := object{"enableIPv6": true, "cidrLimit": 5000}
	for i, a := range c.choices {
		for key, value := range a.values[c.chosen[i]] {
			keys[key] = value
		}
	}
	// Join the prefixes of both families.
	exempt := slices.Concat(cidrs(keys, "exempt4"), cidrs(keys, "exempt6"), slices.Sorted(maps.Keys(c.exempt)))
	masquerade := slices.Concat(cidrs(keys, "masquerade4"), slices.Sorted(maps.Keys(c.masquerade)))
	keys["nonMasqueradeCIDRs"], keys["masqueradeCIDRs"] = exempt, masquerade
	return keys
}

// cidrs removes a list from the keys and returns it.
func cidrs(keys object, list string) []string {
	value, _ := keys[list].([]string)
	delete(keys, list)
	return value
}
