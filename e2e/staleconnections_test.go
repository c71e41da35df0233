// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// flowsPerKind is the number of connections of each protocol to one destination.
const flowsPerKind = 200

// openFlows are connections that a pod keeps open.
type openFlows struct {
	pod  *pod
	to   netip.AddrPort
	udp  []udpFlow
	tcp  []*topology.Conn
	node func(topology.Seen) netip.Addr // the address that the node masquerades with
}

type udpFlow struct {
	port uint16
	seen topology.Seen
}

// open opens connections of both protocols to a destination.
func (n *node) open(t *testing.T, p *pod, dst string, count int) *openFlows {
	t.Helper()
	f := &openFlows{pod: p, to: netip.AddrPortFrom(netip.MustParseAddr(dst), topology.EchoPort)}
	f.node = func(seen topology.Seen) netip.Addr {
		return n.NodeAddr(map[string]*topology.Host{n.LAN.Name: n.LAN, n.Outside.Name: n.Outside}[seen.By], f.to.Addr())
	}
	for range count {
		port := n.nextPort()
		seen := assert.Must(p.SendUDP(f.to, topology.FromPort(port)))(t)
		f.udp = append(f.udp, udpFlow{port, seen})
		conn := assert.Must(p.OpenTCP(f.to))(t)
		t.Cleanup(func() { _ = conn.Close() }) // the test may have reset it
		f.tcp = append(f.tcp, conn)
	}
	return f
}

// outcome is what became of open connections when the pod sent on each of them again.
type outcome struct {
	wrong int // packets that left with a wrong source address
	moved int // connections with another address, port or receiver than before
	reset int // TCP connections that ended
}

// send sends on each connection. The source that the receiver sees has to be translated, or not.
func (f *openFlows) send(t *testing.T, translated bool) (o outcome) {
	t.Helper()
	count := func(before, seen topology.Seen) {
		want := f.pod.addr(f.to.Addr())
		if translated {
			want = f.node(seen)
		}
		if seen.Source.Addr() != want {
			o.wrong++
		}
		if seen.Source != before.Source || seen.By != before.By {
			o.moved++
		}
	}
	for i := range f.udp {
		seen := assert.Must(f.pod.SendUDP(f.to, topology.FromPort(f.udp[i].port)))(t)
		count(f.udp[i].seen, seen)
		f.udp[i].seen = seen
	}
	f.tcp = slices.DeleteFunc(f.tcp, func(c *topology.Conn) bool {
		seen, err := c.Ask()
		if err == nil {
			count(c.Seen, seen)
			return false
		}
		o.reset++
		return true
	})
	return o
}

// conntrackIDs returns the ids of the node's conntrack entries.
func (n *node) conntrackIDs(t *testing.T) []string {
	t.Helper()
	return regexp.MustCompile(`\bid=\d+`).FindAllString(n.tool(t, "conntrack", "-L", "-o", "id"), -1)
}

// gone returns how many of these conntrack entries are gone.
func (n *node) gone(t *testing.T, before []string) int {
	t.Helper()
	after := map[string]bool{}
	for _, id := range n.conntrackIDs(t) {
		after[id] = true
	}
	return len(slices.DeleteFunc(slices.Clone(before), func(id string) bool { return after[id] }))
}

// wantKept fails the test if one of the conntrack entries is gone.
func (n *node) wantKept(t *testing.T, before []string) {
	t.Helper()
	if gone := n.gone(t, before); len(before) == 0 || gone > 0 {
		t.Errorf("%d of %d conntrack entries are gone", gone, len(before))
	}
}

// countPodPackets returns a function that counts the packets with the address of a pod that reached a host
// since its last call.
func (n *node) countPodPackets(t *testing.T, h *topology.Host, from, to string) (packets func() int) {
	t.Helper()
	nft := func(args ...string) string {
		stdout, stderr, code := run(t, h.Command(n.timeout(t), "nft", args...))
		if code != 0 {
			t.Fatalf("nft: exit code %d\n%s", code, stderr)
		}
		return stdout
	}
	nft("table ip pods { chain received { type filter hook prerouting priority 0; ip saddr " + from + " ip daddr " + to + " counter; }; }")
	counted := 0
	return func() (more int) {
		_, counter, _ := strings.Cut(nft("list", "table", "ip", "pods"), "packets ")
		assert.Must(fmt.Sscanf(counter, "%d", &more))(t)
		more, counted = more-counted, more
		return more
	}
}

// TestPolicyChangeUnderConnections changes the verdict of one destination, in both directions, while a pod
// sends on connections to it, to other destinations and to a Service. Once ADD has returned no packet is wrong,
// and no connection to another destination is reset.
func TestPolicyChangeUnderConnections(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		entry := func(changing bool) object {
			exempt := []string{"10.0.0.0/8", "192.168.0.0/16"}
			if changing {
				exempt = append(exempt, "198.51.100.0/24")
			}
			return object{"nonMasqueradeCIDRs": exempt, "staleConnections": "reset"}
		}
		n.feed(t, `table ip services { chain prerouting { type nat hook prerouting priority dstnat;
			ip daddr 10.96.0.1 dnat to numgen random mod 2 map { 0 : 192.168.7.7, 1 : 203.0.113.7 };
		}; }`, "nft", "-f", "-")
		n.conflist(t, "podnet", entry(true))
		p := n.pod(t, "podnet")
		n.pod(t, "podnet") // which stores the subnet
		changed := n.open(t, p, "198.51.100.5", flowsPerKind)
		masqueraded, exempt := n.open(t, p, "203.0.113.5", flowsPerKind/2), n.open(t, p, "192.168.9.9", flowsPerKind/2)
		service := n.open(t, p, "10.96.0.1", flowsPerKind/2)
		untouched := func() {
			t.Helper()
			a, b, c := masqueraded.send(t, true), exempt.send(t, false), service.send(t, true)
			c.wrong = 0 // half of the endpoints are exempt
			if a != (outcome{}) || b != (outcome{}) || c != (outcome{}) {
				t.Errorf("connections that the change is not about: masqueraded %+v, exempt %+v, of a Service %+v", a, b, c)
			}
		}
		if o := changed.send(t, false); o != (outcome{}) {
			t.Fatalf("before the change: %+v", o)
		}
		untouched()
		wrong := n.countPodPackets(t, n.Outside, "10.1.0.0/16", "198.51.100.0/24")
		for _, isExempt := range []bool{false, true} {
			n.conflist(t, "podnet", entry(isExempt))
			var during sync.WaitGroup
			during.Go(func() { changed.send(t, !isExempt) })
			n.pod(t, "podnet")
			during.Wait()
			wrong()
			o := changed.send(t, !isExempt)
			t.Logf("exempt %t: %+v", isExempt, o)
			if count := wrong(); o.wrong > 0 || !isExempt && count > 0 {
				t.Errorf("exempt %t: %+v, %d packets with the pod's address", isExempt, o, count)
			}
			untouched()
			changed.tcp = n.open(t, p, "198.51.100.5", flowsPerKind/4).tcp
		}
		if resets := n.load(t).Record.Resets; len(resets) > 0 {
			t.Errorf("resets on record: %+v", resets)
		}
		// Nothing is deleted by a sync that changes nothing, nor by a move to another chain, nor by cleanup.
		before := n.conntrackIDs(t)
		n.pod(t, "podnet")
		n.reconcileOnce(t)
		n.wantKept(t, before)
		renamed := entry(true)
		renamed["masqChain"] = "OTHER"
		n.conflist(t, "podnet", renamed)
		n.pod(t, "podnet")
		n.wantKept(t, before)
		n.cleanup(t)
		n.wantKept(t, before)
	})
}

// TestFirstRulesUnderConnections: connections that conntrack knows are older than the first rules.
func TestFirstRulesUnderConnections(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.feed(t, "table ip tracks { chain forward { type filter hook forward priority 0; ct state new counter; }; }", "nft", "-f", "-")
	n.write(t, "podnet", n.bridge("podnet"))
	p := n.pod(t, "podnet")
	masqueraded, exempt := n.open(t, p, "203.0.113.5", flowsPerKind), n.open(t, p, "192.168.9.9", 20)
	if o := masqueraded.send(t, false); o != (outcome{}) {
		t.Fatalf("before the first rules: %+v", o)
	}
	n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{"guard": "drop"})}).want(t, 0).noWarnings(t)
	time.Sleep(400 * time.Millisecond) // peers whose data no ACK reached have sent it again
	if o := masqueraded.send(t, true); o.wrong > 0 {
		t.Errorf("masqueraded: %+v", o)
	}
	if o := exempt.send(t, false); o != (outcome{}) {
		t.Errorf("exempt: %+v", o)
	}
}

// TestReconcilerResetsConnections: the reconciler resets connections after a change of its own, and resumes a
// reset that another process left.
func TestReconcilerResetsConnections(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	keys := object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "198.51.100.0/24"}, "guard": "drop"}
	n.conflist(t, "podnet", keys)
	p := n.pod(t, "podnet")
	flows := n.open(t, p, "198.51.100.5", 20)
	d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
	done := func() bool { return len(n.load(t).Record.Resets) == 0 }
	d.until(t, "the end of the resets", done)
	n.conflist(t, "podnet", object{"guard": "drop", "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
	d.until(t, "the reset of connections", func() bool {
		return strings.Contains(d.log(), `msg="reset connections"`) && done()
	})
	if o := flows.send(t, true); o.wrong > 0 {
		t.Errorf("after a change of the conflist: %+v", o)
	}
	wantText(t, "the log", d.log(), "count=40 ", "chain=IP-MASQ-AGENT")
	d.until(t, "the metric", func() bool { return d.metric(t, "connections_reset_total", `family="ipv4"`) == 40 })
	d.stop(t)

	// Connections that a change left, and the reset of a process that was killed.
	left := n.leavePendingReset(t, p)
	restarted := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
	restarted.until(t, "the end of the resets", done)
	if o := left.send(t, true); o.wrong > 0 {
		t.Errorf("after the restart: %+v", o)
	}
}

// TestMetricOfResets: the metric has the connections that ADDs reset, whether or not a reconciler ran, and does not
// fall when the reconciler restarts.
func TestMetricOfResets(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	exempt := func(list ...string) {
		n.conflist(t, "podnet", object{"nonMasqueradeCIDRs": append(list, "10.0.0.0/8"), "staleConnections": "reset"})
	}
	exempt("198.51.100.0/24")
	p := n.pod(t, "podnet")
	n.open(t, p, "198.51.100.5", 20)
	exempt()
	n.pod(t, "podnet")
	for range 2 {
		d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
		d.wantMetric(t, 40, "connections_reset_total", `family="ipv4"`)
		d.stop(t)
	}
	d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
	n.open(t, p, "198.51.100.6", 20)
	exempt("198.51.100.0/24")
	n.pod(t, "podnet") // the reconciler sees the conflist, too
	d.until(t, "the metric of both resets", func() bool { return d.metric(t, "connections_reset_total", `family="ipv4"`) == 80 })
}

// leavePendingReset opens connections that are exempt and puts a reset of them on record, as a process that
// was killed after it made their destination masqueraded. The conflist then has pendingKeys.
func (n *node) leavePendingReset(t *testing.T, p *pod) *openFlows {
	t.Helper()
	add := func(keys object) {
		n.conflist(t, "podnet", keys)
		n.pod(t, "podnet")
	}
	add(object{"staleConnections": "keep", "nonMasqueradeCIDRs": []string{"198.51.100.0/24", "10.0.0.0/8"}})
	left := n.open(t, p, "198.51.100.6", 20)
	old := *n.load(t).Find(networkID("podnet"))
	add(object{"staleConnections": "keep", "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
	add(pendingKeys())
	if o := left.send(t, false); o != (outcome{}) {
		t.Fatalf("%+v", o)
	}
	lock := assert.Must(store.Open(n.dataDir).Lock(t.Context()))(t)
	rec := n.load(t).Record
	rec.Resets, rec.LastReset = []store.Reset{{At: 1, Before: []policy.Source{old}}}, 0 // after At it would be one that failed
	must(t, errors.Join(lock.PutRecord(rec), lock.Release()))
	return left
}

func pendingKeys() object {
	return object{"staleConnections": "reset", "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}
}

// TestPendingReset: ADD, DEL and GC resume a reset on record, unless a reconciler is active, which does. ADD
// returns after two seconds if the reset takes longer, and says so. None does where it cannot be recorded.
func TestPendingReset(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", pendingKeys())
	p := n.pod(t, "podnet")
	keys := pendingKeys()
	keys["prevResult"] = resultWith("10.1.0.99/16")
	conf := n.conf(t, "podnet", keys)
	for _, verb := range []string{"DEL", "GC", "ADD"} {
		left := n.leavePendingReset(t, p)
		call := invocation{verb: verb, conf: conf, id: "another"}
		active := assert.Must(store.Open(n.dataDir).InstanceLock())(t)
		n.invoke(t, call).want(t, 0).noWarnings(t)
		if o := left.send(t, false); o != (outcome{}) || len(n.load(t).Record.Resets) != 1 {
			t.Errorf("%s beside a reconciler: %+v, resets on record: %+v", verb, o, n.load(t).Record.Resets)
		}
		must(t, active.Release())
		if verb == "ADD" {
			lock := assert.Must(store.Open(n.dataDir).Lock(t.Context()))(t)
			late := n.invoke(t, call).want(t, 0, "connections that are older than a change of the rules may keep a wrong source address")
			must(t, lock.Release())
			if late.took < 2*time.Second || timelimit.Exceeded(late.took, 5*time.Second) {
				t.Errorf("ADD took %s, want two seconds", late.took)
			}
		}
		writable := n.readOnly(t, n.dataDir) // a walk that cannot be recorded would be repeated without end
		code := uint(0)
		if verb == "ADD" { // its pod cannot be recorded either
			code = 11
		}
		n.invoke(t, call).want(t, code, "read-only file system")
		if o := left.send(t, false); o != (outcome{}) {
			t.Errorf("%s with a read-only dataDir: %+v", verb, o)
		}
		writable()
		n.invoke(t, call).want(t, 0).noWarnings(t)
		if o := left.send(t, true); o.wrong > 0 || len(n.load(t).Record.Resets) > 0 {
			t.Errorf("%s: %+v, resets on record: %+v", verb, o, n.load(t).Record.Resets)
		}
	}
}
