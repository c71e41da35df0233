// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// whoConnection is what the command who prints about a connection, as far as tests compare it.
type whoConnection struct {
	Protocol, Source, Destination, Endpoint, Chain, Verdict string
	SourcePort, DestinationPort                             uint16
	SourceLocal, Translated                                 bool
}

// who asks which connections leave with an address and port.
func (n *node) who(t *testing.T, args ...string) []whoConnection {
	t.Helper()
	stdout, stderr, code := n.byHand(t, append([]string{"who", "-o", "json"}, args...)...)
	var answer struct{ Connections []whoConnection }
	if err := json.Unmarshal([]byte(stdout), &answer); err != nil || code != min(1, max(0, 1-len(answer.Connections))) {
		t.Fatalf("who %v: exit code %d, %v\n%s%s", args, code, err, stdout, stderr)
	}
	return answer.Connections
}

// TestWho: a pod and the node have connections that are masqueraded, exempt and those of a Service. Whatever a receiver
// sees, who names the source, the destination and the chain.
func TestWho(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.feed(t, `table ip services { chain prerouting { type nat hook prerouting priority dstnat; ip daddr 10.96.0.1 dnat to 203.0.113.7; }; }`, "nft", "-f", "-")
		n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"192.168.0.0/16", "2001:db8:2::/48"}})
		p, none := n.pod(t, "podnet"), netip.Addr{}
		for _, flow := range []struct {
			to, endpoint, verdict string
			fromNode              bool
		}{
			{to: "203.0.113.5", verdict: "masquerade"}, {to: "192.168.9.9", verdict: "exempt"},
			{to: "10.96.0.1", endpoint: "203.0.113.7", verdict: "masquerade"},
			{to: "2001:db8:1::5", verdict: "masquerade"}, {to: "2001:db8:2::5", verdict: "exempt"},
			{to: "203.0.113.6", verdict: "masquerade", fromNode: true},
		} {
			to := netip.AddrPortFrom(netip.MustParseAddr(flow.to), topology.EchoPort)
			from, address := p.Host, p.addr(to.Addr())
			if flow.fromNode {
				from, address = n.Node, none
			}
			port := n.nextPort()
			udp := assert.Must(from.SendUDP(to, topology.FromPort(port)))(t)
			conn := assert.Must(from.OpenTCP(to, topology.FromPort(port)))(t)
			for protocol, seen := range map[string]topology.Seen{"udp": udp, "tcp": conn.Seen} {
				if !address.IsValid() {
					address = seen.Source.Addr()
				}
				want := []whoConnection{{
					Protocol: protocol, Source: address.String(), SourcePort: port, Destination: flow.to, DestinationPort: to.Port(),
					Endpoint: flow.to, Chain: "IP-MASQ-AGENT", Verdict: flow.verdict, SourceLocal: flow.fromNode,
					Translated: seen.Source != netip.AddrPortFrom(address, port),
				}}
				if flow.endpoint != "" {
					want[0].Endpoint = flow.endpoint
				}
				if !flow.fromNode && want[0].Translated != (flow.verdict == "masquerade") {
					t.Errorf("to %s: seen %s", flow.to, seen.Source)
				}
				at := seen.Source.String()
				for _, args := range [][]string{{at, "--protocol", protocol}, {at, "--protocol", protocol, "--to", want[0].Endpoint}, {at, "--protocol", protocol, "--to", flow.to}} {
					wantSame(t, fmt.Sprintf("who %v", args), n.who(t, args...), want)
				}
				if all := n.who(t, at); len(all) == 0 || len(all) > 2 || all[0] != want[0] && all[len(all)-1] != want[0] {
					t.Errorf("who %s: %+v", at, all)
				}
			}
			must(t, conn.Close())
		}
		gone := "203.0.113.99:9"
		if found := n.who(t, gone); len(found) > 0 {
			t.Errorf("who %s: %+v", gone, found)
		}
		stdout, stderr, code := n.byHand(t, "who", gone)
		if code != 1 || stdout != "" || !strings.Contains(stderr, "no connection leaves with "+gone) {
			t.Errorf("who %s: exit code %d\n%s%s", gone, code, stdout, stderr)
		}
		seen := assert.Must(p.SendUDP(netip.AddrPortFrom(netip.MustParseAddr("203.0.113.5"), topology.EchoPort), topology.FromPort(999)))(t)
		stdout, stderr, code = n.byHand(t, "who", seen.Source.String(), "--to", "203.0.113.5", "--protocol", "udp")
		want := fmt.Sprintf("udp %s:999 to 203.0.113.5:%d\n  chain    IP-MASQ-AGENT, masqueraded\n", p.addr(netip.IPv4Unspecified()), topology.EchoPort)
		if code != 0 || stdout != want {
			t.Errorf("who %s: exit code %d\n%s%s", seen.Source, code, stdout, stderr)
		}
	})
}

// TestLogOfEndedConnections: who knows no connection that has ended, and names the command whose log has it.
func TestLogOfEndedConnections(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", nil)
	p := n.pod(t, "podnet")
	_, stderr, _ := n.byHand(t, "who", "203.0.113.99:9")
	_, command, _ := strings.Cut(stderr, "log them beforehand: ")
	name, args, _ := strings.Cut(strings.TrimSpace(command), " ")
	path := filepath.Join(n.dir, "connections.log")
	file := assert.Must(os.Create(path))(t)
	log := n.Node.Command(t.Context(), name, strings.Fields(args)...)
	log.Stdout = file
	must(t, log.Start())
	to, pod := netip.MustParseAddrPort("203.0.113.5:7"), p.addr(netip.IPv4Unspecified()).String()
	var text []byte
	logged := timelimit.Await(timelimit.Wait, func() bool { // once the command listens
		seen := assert.Must(p.SendUDP(to))(t)
		n.tool(t, "conntrack", "-D", "-s", pod)
		if found := n.who(t, seen.Source.String()); len(found) > 0 {
			t.Fatalf("who knows a connection that has ended: %+v", found)
		}
		text = assert.Must(os.ReadFile(path))(t)
		const line = `\[DESTROY\] udp .* src=%s dst=203.0.113.5 .* dst=%s sport=7 dport=%d`
		return regexp.MustCompile(fmt.Sprintf(line, pod, seen.Source.Addr(), seen.Source.Port())).Match(text)
	})
	if !logged {
		t.Errorf("%s logs\n%s", command, text)
	}
}

// TestMetricOfExemptPods: the metric counts the pods at the time of the scrape, or of a sync that runs, also where the
// kernel has no events.
func TestMetricOfExemptPods(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}})
		d := n.startReconciler(t).untilReady(t)
		for want := range 3 {
			d.until(t, fmt.Sprintf("exempt_pods %d", want), func() bool {
				return d.metric(t, "exempt_pods", `chain="IP-MASQ-AGENT"`) == float64(want)
			})
			n.podOf(t, "prod")
		}
	})
}

// TestPodsByName: explain, who, status, doctor and the metric know the pods that ADDs recorded.
func TestPodsByName(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}, "enableIPv6": true})
	prod, dev := n.podOf(t, "prod"), n.podOf(t, "dev")
	d := n.startReconciler(t).untilReady(t)
	json := func(code int, args ...string) string {
		t.Helper()
		stdout, stderr, got := n.byHand(t, append(args, "-o", "json")...)
		if got != code {
			t.Errorf("%v: exit code %d, want %d\n%s%s", args, got, code, stdout, stderr)
		}
		return strings.Join(strings.Fields(stdout), "")
	}
	const names = `"pod":{"namespace":"%s","name":"web-0"}`
	for p, c := range map[*pod]struct{ namespace, verdict string }{prod: {"prod", "exempt"}, dev: {"dev", "masquerade"}} {
		for _, dst := range []string{"1.2.3.4", "2001:db8:5::5"} {
			from := p.addr(netip.MustParseAddr(dst)).String()
			for _, source := range [][]string{{"--from", from}, {"--pod", c.namespace + "/web-0"}} {
				got := json(0, append([]string{"explain", dst}, source...)...)
				wantText(t, "explain "+dst, got, fmt.Sprintf(names, c.namespace), `"source":"`+from+`"`, `"verdict":"`+c.verdict+`"`, `"kernel":true`)
			}
			to := netip.AddrPortFrom(netip.MustParseAddr(dst), topology.EchoPort)
			seen := assert.Must(p.SendUDP(to))(t)
			if got := json(0, "who", seen.Source.String(), "--protocol", "udp", "--to", dst); !strings.Contains(got, fmt.Sprintf(names, c.namespace)) ||
				!strings.Contains(got, `"verdict":"`+c.verdict+`"`) {
				t.Errorf("who %s: %s", seen.Source, got)
			}
		}
	}
	for _, args := range [][]string{{"--pod", "prod/web-1"}, {"--pod", "other/web-0"}} {
		if stdout, stderr, code := n.byHand(t, append([]string{"explain", "1.2.3.4"}, args...)...); code != 1 || stdout != "" || !strings.Contains(stderr, "no pod of this name") {
			t.Errorf("explain %v: exit code %d\n%s%s", args, code, stdout, stderr)
		}
	}
	wantText(t, "explain of an address without a pod", json(0, "explain", "1.2.3.4", "--from", "10.1.255.254"), `"pod":null`)
	wantPods := func(recorded, exempt, without int) {
		t.Helper()
		got, found := json(0, "status"), json(0, "doctor")
		want := fmt.Sprintf(`"pods":{"recorded":%d,"exempt":%d,"withoutRecord":%d}`, recorded, exempt, without)
		const finding = `"id":"pods-without-record"`
		if !strings.Contains(got, want) || strings.Contains(got, finding) != (without > 0) || strings.Contains(found, finding) != (without > 0) {
			t.Errorf("status lacks %s, or the finding is wrong: %s\n%s", want, got, found)
		}
		d.until(t, "the metric", func() bool { return d.metric(t, "exempt_pods", `chain="IP-MASQ-AGENT"`) == float64(exempt) })
	}
	wantPods(2, 1, 0)
	n.podOf(t, "prod")
	wantPods(3, 2, 0)
	// The record of dev's pod, as an earlier version made it.
	files := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "attachments", "*", "*", "*")))(t)
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), "\ndev\n") {
			must(t, os.Truncate(file, 0))
		}
	}
	wantPods(2, 2, 1)
	for _, text := range []string{d.log(), d.scrape(t)} {
		if strings.Contains(text, "web-0") {
			t.Errorf("has the name of a pod:\n%s", text)
		}
	}
}

// TestPodsOfTheCache: pods that started before the entry are exempt by the runtime's cache, whatever the wall clock is
// now. status and doctor count those that cannot be recorded and say why, with a reconciler and without one.
func TestPodsOfTheCache(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.write(t, "podnet", n.bridge("podnet"))
		cache := n.own("/var/lib/cni/results")
		known := map[string]bool{}
		pod := func(mode fs.FileMode, changes ...string) *pod {
			t.Helper()
			p := n.podOf(t, "prod")
			for _, file := range assert.Must(filepath.Glob(cache + "/podnet-*"))(t) {
				if known[file] {
					continue
				}
				known[file] = true
				text := strings.NewReplacer(changes...).Replace(string(assert.Must(os.ReadFile(file))(t)))
				must(t, os.WriteFile(file, []byte(text), 0o600))
				must(t, os.Chmod(file, mode))
				old := time.Now().Add(-20 * 365 * 24 * time.Hour) // as after a step of the clock
				must(t, os.Chtimes(file, old, old))
			}
			return p
		}
		good := pod(0o600)
		writable := pod(0o664)
		ofProcess := pod(0o600, `"netns":"`, `"netns":"/proc/1/ns/net`)
		n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}})
		d := n.startReconciler(t, "--resync-interval", "1s").untilReady(t)
		d.until(t, "the metric", func() bool { return d.metric(t, "exempt_pods", `chain="IP-MASQ-AGENT"`) == 1 })
		const dst = "1.2.3.4"
		n.exempt(t, good, true, dst)
		n.exempt(t, writable, false, dst)
		n.exempt(t, ofProcess, false, dst)
		counted := func(code int) {
			t.Helper()
			confDir := "--cni-conf-dir=" + n.cni.ConfDir
			stdout, stderr, got := n.byHand(t, "status", "-o", "json", confDir)
			if got != code {
				t.Errorf("status: exit code %d, want %d: %s", got, code, stderr)
			}
			wantText(t, "status", strings.Join(strings.Fields(stdout), ""), `"pods":{"recorded":1,"exempt":1,"withoutRecord":2}`, `"id":"pods-without-record"`)
			stdout, _, _ = n.byHand(t, "doctor", confDir)
			wantText(t, "doctor", stdout, "pods-without-record", "mode 0664", "/proc/PID/ns/net")
		}
		counted(0)
		d.stop(t)
		counted(1)
	})
}

// TestOnlyCNIArgsNameAPod: what tenants write, or others than the kubelet, names no namespace.
func TestOnlyCNIArgsNameAPod(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	prod := object{"K8S_POD_NAMESPACE": "prod", "K8S_POD_NAME": "web-0"}
	conf := object{
		"nonMasqueradeNamespaces": []string{"prod"}, "args": object{"cni": prod},
		"runtimeConfig": object{"io.kubernetes.cri.pod-annotations": prod}, "capabilities": object{"io.kubernetes.cri.pod-annotations": true},
	}
	for _, args := range []string{"", "K8S_POD_NAMESPACE=dev;K8S_POD_NAME=web-0"} {
		n.call(t, conf, call{"ADD", "a", args, []string{"10.1.0.5/16"}}).want(t, 0)
		n.exemptAddresses(t)
	}
	n.call(t, conf, call{"ADD", "a", "K8S_POD_NAMESPACE=prod", []string{"10.1.0.5/16"}}).want(t, 0)
	n.exemptAddresses(t, "10.1.0.5")
}

// TestConnectionCounters checks that connections_total counts each connection once by its verdict,
// and keeps the counts when a repair replaces the rules.
func TestConnectionCounters(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		policy := "nonMasqueradeCIDRs: [10.0.0.0/8]\nresyncInterval: 1s\n" +
			"sourceCIDRs: [10.1.0.0/16]\nmasqueradeHost: false\n" // the node itself sends IGMP
		n.agentFile(t, "ip-masq-agent", policy)
		d := n.startReconciler(t).untilReady(t)
		n.write(t, "podnet", n.bridge("podnet"))
		p := n.pod(t, "podnet")
		send := func(times int) {
			t.Helper()
			for range times {
				for _, to := range []string{"10.20.0.5", "198.51.100.7"} {
					dst := netip.AddrPortFrom(netip.MustParseAddr(to), topology.EchoPort)
					assert.Must(p.SendUDP(dst))(t)
				}
			}
		}
		count := func(action string) float64 {
			return d.metric(t, "connections_total", `action="`+action+`"`, `family="ipv4"`)
		}
		want := func(exempt, masqueraded float64) {
			t.Helper()
			d.until(t, "current counters", func() bool { return count("exempt") >= exempt && count("masquerade") >= masqueraded })
			if e, m := count("exempt"), count("masquerade"); e != exempt || m != masqueraded {
				t.Errorf("%v exempt and %v masqueraded, want %v and %v", e, m, exempt, masqueraded)
			}
		}
		send(3)
		want(3, 3)
		repaired := d.metric(t, "reconciles_total", `result="repaired"`)
		n.flushMasqChain(t)
		d.until(t, "repair", func() bool { return d.metric(t, "reconciles_total", `result="repaired"`) > repaired })
		want(3, 3)
		send(2)
		want(5, 5)
		// The chain of enforceExempt decides before the masquerade chain.
		n.agentFile(t, "ip-masq-agent", policy+"enforceExempt: true\n")
		d.until(t, "enforceExempt", func() bool { return strings.Contains(d.scrape(t), "guard_active{") })
		send(4)
		want(9, 9)
	})
}

// flushMasqChain removes the rules of the owned chain.
func (n *node) flushMasqChain(t *testing.T) {
	t.Helper()
	if n.backend.variant == "" {
		n.tool(t, "nft", "flush", "chain", "ip", "ip-masq", "masq-IP-MASQ-AGENT")
		return
	}
	n.tool(t, "iptables", "-t", "nat", "-F", "IP-MASQ-AGENT")
}
