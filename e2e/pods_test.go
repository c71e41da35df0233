// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// podOf makes a pod of a Kubernetes namespace, as the kubelet's runtimes start it.
func (n *node) podOf(t *testing.T, namespace string) *pod {
	t.Helper()
	env := n.cni.Env
	defer func() { n.cni.Env = env }()
	n.cni.Env = append(slices.Clone(env), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE="+namespace+";K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=x")
	return n.pod(t, "podnet")
}

// exempt fails the test unless a pod leaves with its own address, or with the node's.
func (n *node) exempt(t *testing.T, p *pod, want bool, destinations ...string) {
	t.Helper()
	for _, dst := range destinations {
		source := ""
		if want {
			source = p.addr(netip.MustParseAddr(dst)).String()
		}
		n.leaves(t, p.Host, dst, n.Outside, source)
	}
}

// TestNamespaces: pods of a namespace are never masqueraded, from before their ADD returns until their address passes to
// another pod.
func TestNamespaces(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		const v4, v6 = "1.2.3.4", "2001:db8:5::5"
		conf := object{"nonMasqueradeNamespaces": []string{"prod", "kube-system"}, "enableIPv6": true, "guard": "drop", "enforceExempt": true}
		n.conflist(t, "podnet", conf)
		prod, dev, none := n.podOf(t, "prod"), n.podOf(t, "dev"), n.pod(t, "podnet")
		n.exempt(t, prod, true, v4, v6)
		n.exempt(t, dev, false, v4, v6)
		n.exempt(t, none, false, v4, v6)
		succeeds(t, "CHECK")(n.check(t, "podnet", prod))
		n.wantSays(t, 0, nil, "check")

		// A changed list is about pods that run.
		conf["nonMasqueradeNamespaces"] = []string{"dev"}
		n.conflist(t, "podnet", conf)
		n.podOf(t, "other")
		n.exempt(t, prod, false, v4, v6)
		n.exempt(t, dev, true, v4, v6)
		n.conflist(t, "podnet", object{"enableIPv6": true})
		n.pod(t, "podnet")
		n.exempt(t, dev, false, v4, v6)
		if p := n.load(t).Record.Pods; len(p) > 0 {
			t.Errorf("on record: %+v", p)
		}
	})
}

// call is a call for a pod that has no network of its own.
type call struct {
	verb, id, args string
	addresses      []string
}

func (n *node) call(t *testing.T, conf object, c call) result {
	t.Helper()
	prev := resultWith("0.0.0.0/0")
	var ips []object
	for _, a := range c.addresses {
		ips = append(ips, object{"address": a, "interface": 0})
	}
	prev["ips"] = ips
	with := object{"prevResult": prev}
	for k, v := range conf {
		with[k] = v
	}
	network, named := conf["name"].(string)
	if !named {
		network = "podnet"
	}
	return n.invoke(t, invocation{verb: c.verb, id: c.id, conf: n.conf(t, network, with), args: c.args})
}

// exemptAddresses fails the test unless these addresses are exempt, on record and in the rules.
func (n *node) exemptAddresses(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, p := range n.load(t).Record.Pods {
		got = append(got, p.Address.String())
	}
	wantSame(t, "exempt on record", fmt.Sprint(got), fmt.Sprint(want))
	for _, a := range []string{"10.1.0.5", "10.1.0.6", "10.1.0.7"} {
		stdout, stderr, _ := n.reconciler(t, "explain", "1.2.3.4", "--from", a, "-o", "json")
		exempt := strings.Contains(stdout, `"verdict": "exempt"`) && strings.Contains(stdout, `"kernel": true`)
		if exempt != strings.Contains(fmt.Sprint(want), a) {
			t.Errorf("explain %s: %s%s", a, stdout, stderr)
		}
	}
}

// TestFormerConnections: connections of a pod do not pass to the next pod with its address, and no others end.
func TestFormerConnections(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}, "staleConnections": "keep", "enableIPv6": true}
		n.conflist(t, "podnet", conf)
		other := n.podOf(t, "prod")
		others := []*openFlows{n.open(t, other, "1.2.3.4", 5), n.open(t, other, "2001:db8:5::5", 5)}
		for _, from := range []string{"prod", "dev"} {
			p := n.podOf(t, from)
			flows := []*openFlows{n.open(t, p, "1.2.3.4", 20), n.open(t, p, "2001:db8:5::5", 20)}
			next := map[string]string{"prod": "dev", "dev": "prod"}[from]
			before := n.conntrackIDs(t)
			n.call(t, conf, call{"ADD", "next-" + next, "K8S_POD_NAMESPACE=" + next,
				[]string{p.addrs[0].String() + "/16", p.addrs[1].String() + "/64"}}).want(t, 0)
			if gone := n.gone(t, before); gone < 80 {
				t.Errorf("from %s to %s: %d connections ended, want 80", from, next, gone)
			}
			for i, f := range flows {
				if o := f.send(t, next == "dev"); o.wrong > 0 {
					t.Errorf("from %s to %s, %d: %+v", from, next, i, o)
				}
			}
		}
		// So too if the list changes with the ADD, or its record was lost.
		for from, change := range map[string]func(){
			"dev":  func() { conf["nonMasqueradeNamespaces"] = []string{"other", "prod"} },
			"prod": func() { must(t, os.Remove(filepath.Join(n.dataDir, "record.json"))) },
		} {
			p := n.podOf(t, from)
			n.open(t, p, "1.2.3.4", 20)
			change()
			n.conflist(t, "podnet", conf)
			before := n.conntrackIDs(t)
			next := map[string]string{"prod": "dev", "dev": "prod"}[from]
			n.call(t, conf, call{"ADD", "changed-" + next, "K8S_POD_NAMESPACE=" + next, []string{p.addrs[0].String() + "/16"}}).want(t, 0)
			if gone := n.gone(t, before); gone < 40 {
				t.Errorf("from %s to %s: %d connections ended, want 40", from, next, gone)
			}
		}
		for _, f := range others {
			if o := f.send(t, false); o.wrong+o.moved+o.reset > 0 {
				t.Errorf("of another pod: %+v", o)
			}
		}
	})
}

// TestPodNames: which CNI_ARGS name a namespace.
func TestPodNames(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
	for i, c := range []struct {
		args string
		want bool
	}{
		{"K8S_POD_NAMESPACE=prod", true},
		{"IgnoreUnknown=1;K8S_POD_NAMESPACE=prod;K8S_POD_NAME=a;K8S_POD_NAMESPACE=prod", true},
		{"K8S_POD_NAMESPACE=prod;K8S_POD_NAME=UPPER", true},
		{"K8S_POD_NAMESPACE=prod;K8S_POD_NAMESPACE=dev", false},
		{"K8S_POD_NAMESPACE=Prod", false},
		{"K8S_POD_NAMESPACE=prod=", false},
		{"K8S_POD_NAMESPACE", false},
		{"K8S_POD_NAME=prod", false},
		{"", false},
	} {
		n.call(t, conf, call{"ADD", "a", c.args, []string{"10.1.0.5/16", "169.254.1.1/16"}}).want(t, 0)
		wantSame(t, fmt.Sprintf("%d: whether a pod is exempt by %s", i, c.args), len(n.load(t).Record.Pods) == 1, c.want)
	}
}

// TestAddressOfTheNode: a pod that claims an address of the node ends none of the node's connections.
func TestAddressOfTheNode(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		n.conflist(t, "podnet", conf)
		p := n.podOf(t, "prod")
		n.open(t, p, "1.2.3.4", 5)
		to := netip.AddrPortFrom(netip.MustParseAddr("1.2.3.4"), topology.EchoPort)
		seen := assert.Must(n.Node.SendUDP(to))(t)
		before := n.conntrackIDs(t)
		own := seen.Source.Addr().String()
		for i, namespace := range []string{"prod", "dev"} {
			n.call(t, conf, call{"ADD", fmt.Sprint(i), "K8S_POD_NAMESPACE=" + namespace, []string{own + "/16"}}).want(t, 0)
			n.wantKept(t, before)
		}
		n.call(t, conf, call{"ADD", "next", "K8S_POD_NAMESPACE=dev", []string{p.addrs[0].String() + "/16"}}).want(t, 0)
		wantSame(t, "connections that ended", n.gone(t, before), 10)
	})
}

// TestAddressesWithPluginFile: with a plugin.toml, attachments take addresses only by an entry that the conflist has, or
// had in this boot.
func TestAddressesWithPluginFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
	n.conflist(t, "podnet", conf)
	writeTempFile(t, n.own(config.DefaultPluginFile), n.pluginFile(""))
	prod, dev := "K8S_POD_NAMESPACE=prod", "K8S_POD_NAMESPACE=dev"
	n.call(t, conf, call{"ADD", "a", prod, []string{"10.1.0.5/16"}}).want(t, 0)
	n.exemptAddresses(t, "10.1.0.5")
	other := object{"nonMasqueradeNamespaces": []string{"prod"}, "nonMasqueradeCIDRs": []string{"20.0.0.0/8"}}
	for _, args := range []string{prod, dev} {
		n.call(t, other, call{"ADD", "b", args, []string{"10.1.0.5/16", "10.1.0.6/16"}}).want(t, 0)
		n.exemptAddresses(t, "10.1.0.5")
		n.call(t, object{"name": "othernet"}, call{"ADD", "c", args, []string{"10.1.0.5/16", "10.1.0.7/16"}}).want(t, 7)
		n.exemptAddresses(t, "10.1.0.5")
	}
	n.call(t, other, call{verb: "DEL", id: "b"}).want(t, 0)
	n.exemptAddresses(t, "10.1.0.5")
	n.call(t, conf, call{"ADD", "b", dev, []string{"10.1.0.5/16"}}).want(t, 0)
	n.exemptAddresses(t)
	// The runtime goes on with an entry that the conflist had.
	n.conflist(t, "podnet", other)
	n.reconcileOnce(t) // reads this one
	now := object{"nonMasqueradeNamespaces": []string{"prod"}, "nonMasqueradeCIDRs": []string{"30.0.0.0/8"}}
	n.conflist(t, "podnet", now)
	never := object{"nonMasqueradeNamespaces": []string{"prod"}, "nonMasqueradeCIDRs": []string{"40.0.0.0/8"}}
	for _, former := range []object{conf, other} {
		n.call(t, former, call{"ADD", "c", prod, []string{"10.1.0.6/16"}}).want(t, 0)
		n.exemptAddresses(t, "10.1.0.6")
		n.call(t, never, call{"ADD", "d", dev, []string{"10.1.0.6/16"}}).want(t, 0)
		n.exemptAddresses(t, "10.1.0.6")
		n.call(t, former, call{verb: "DEL", id: "c"}).want(t, 0)
		n.exemptAddresses(t)
	}
	// So too while the conflist is torn.
	file := filepath.Join(n.cni.ConfDir, "10-podnet.conflist")
	must(t, os.WriteFile(file, readFile(t, file)[:100], 0o600))
	n.call(t, never, call{"ADD", "e", prod, []string{"10.1.0.6/16"}}).want(t, 0)
	n.exemptAddresses(t)
	n.call(t, now, call{"ADD", "f", prod, []string{"10.1.0.6/16"}}).want(t, 0)
	n.exemptAddresses(t, "10.1.0.6")
	n.call(t, now, call{verb: "DEL", id: "f"}).want(t, 0)
	// The last 16 count.
	for i := range 16 {
		now["nonMasqueradeCIDRs"] = []string{fmt.Sprintf("50.%d.0.0/16", i)}
		n.conflist(t, "podnet", now)
		n.call(t, now, call{"ADD", "g", dev, []string{"10.1.0.7/16"}}).want(t, 0)
	}
	n.call(t, conf, call{"ADD", "h", prod, []string{"10.1.0.6/16"}}).want(t, 0)
	n.exemptAddresses(t)
	now["nonMasqueradeCIDRs"] = []string{"50.0.0.0/16"}
	n.call(t, now, call{"ADD", "h", prod, []string{"10.1.0.6/16"}}).want(t, 0)
	n.exemptAddresses(t, "10.1.0.6")
}

// formerPod makes an exempt pod with a connection, and keeps others from walks of the conntrack table until the file is closed.
func (n *node) formerPod(t *testing.T, conf object, address string) (walks *os.File) {
	t.Helper()
	n.call(t, conf, call{"ADD", "former", "K8S_POD_NAMESPACE=prod", []string{address + "/16"}}).want(t, 0)
	n.tool(t, "conntrack", "-I", "-p", "udp", "-s", address, "-d", "1.2.3.4", "--sport", "4000", "--dport", "53", "--timeout", "600")
	walks = assert.Must(os.OpenFile(filepath.Join(n.dataDir, "resets.lock"), os.O_CREATE|os.O_RDWR, 0o600))(t)
	must(t, unix.Flock(int(walks.Fd()), unix.LOCK_EX))
	return walks
}

// noConnections fails the test if conntrack has a connection from the address.
func (n *node) noConnections(t *testing.T, address string) {
	t.Helper()
	if left := n.tool(t, "conntrack", "-L", "-s", address); strings.Contains(left, address) {
		t.Errorf("after ADD: %s", left)
	}
}

// TestFormerConnectionsAfterOtherWalks: an ADD that takes the address of an exempt pod returns after the connections of the
// address have ended, also where the walks of other ADDs come first.
func TestFormerConnectionsAfterOtherWalks(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		const address = "10.1.7.1"
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		n.conflist(t, "podnet", conf)
		walks := n.formerPod(t, conf, address)
		time.AfterFunc(3*time.Second, func() { _ = walks.Close() }) // it was only locked
		n.call(t, conf, call{"ADD", "next", "K8S_POD_NAMESPACE=dev", []string{address + "/16"}}).want(t, 0)
		n.noConnections(t, address)
	})
}

// TestFormerConnectionsOfAKilledADD: the retry of an ADD that was killed before the connections of its address had ended ends
// them, also beside a reconciler that has not heard of it.
func TestFormerConnectionsOfAKilledADD(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		const address = "10.1.7.1"
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		n.conflist(t, "podnet", conf)
		n.startReconciler(t).untilReady(t)
		walks := n.formerPod(t, conf, address)
		keys := object{"nonMasqueradeNamespaces": []string{"prod"}, "prevResult": resultWith(address + "/16")}
		next := invocation{verb: "ADD", id: "next", conf: n.conf(t, "podnet", keys), args: "K8S_POD_NAMESPACE=dev"}
		killed := n.prepare(t, next)
		must(t, killed.Start())
		if !timelimit.Await(timelimit.Wait, func() bool { return len(n.load(t).Record.Resets) > 0 }) {
			t.Fatal("the record does not say that the address passed")
		}
		must(t, killed.Process.Kill())
		_ = killed.Wait() // it was killed
		must(t, walks.Close())
		n.invoke(t, next).want(t, 0)
		n.noConnections(t, address)
	})
}

// TestManyAddresses: of a pod with more than 64 addresses ADD says how many count.
func TestManyAddresses(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	var addresses []string
	for i := range 65 {
		addresses = append(addresses, fmt.Sprintf("10.1.8.%d/16", i))
	}
	conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
	n.call(t, conf, call{"ADD", "few", "K8S_POD_NAMESPACE=prod", addresses[:64]}).want(t, 0).noWarnings(t)
	n.call(t, conf, call{"ADD", "many", "K8S_POD_NAMESPACE=prod", addresses}).want(t, 0, "65 addresses", "about 64 of them")
}

// TestExemptPodsBound: a chain in iptables can have 1,024 exempt addresses of pods.
func TestExemptPodsBound(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[:2] {
		n := newNode(t, f)
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		add := func(pod, count int, namespace string) result {
			var list []string
			for i := range count {
				list = append(list, fmt.Sprintf("10.1.%d.%d/16", 1+pod, 1+i))
			}
			return n.call(t, conf, call{"ADD", fmt.Sprint("pod", pod), "K8S_POD_NAMESPACE=" + namespace, list})
		}
		const each = 64
		for pod := range policy.MaxExemptPods / each {
			add(pod, each, "prod").want(t, 0)
		}
		if f.variant == "" {
			add(99, 1, "prod").want(t, 0)
			continue
		}
		before := n.ruleset(t)
		add(99, 1, "prod").want(t, 7, "nonMasqueradeNamespaces", "1025", "1024", "nftables")
		add(100, 1, "dev").want(t, 0)
		if n.ruleset(t) != before || len(n.load(t).Record.Pods) != policy.MaxExemptPods {
			t.Error("the rules or the record changed")
		}
		conf["nonMasqueradeNamespaces"] = []string{"prod", "dev"}
		add(101, 1, "other").want(t, 7, "1026")
		conf["nonMasqueradeNamespaces"] = []string{"prod"}
		add(101, 1, "other").want(t, 0)
		assert.Equal(t, "rules", n.ruleset(t), before)
		n.call(t, conf, call{verb: "DEL", id: "pod0"}).want(t, 0)
		add(99, 1, "prod").want(t, 0)
	}
}

// TestListBeyondTheBound: a changed list of namespaces that is about too many addresses does not come into force.
// The commands are about the list that stays, and say why.
func TestListBeyondTheBound(t *testing.T) {
	t.Parallel()
	const each, pods = 64, policy.MaxExemptPods/64 + 1
	n := newNode(t, backends()[1])
	conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
	n.conflist(t, "podnet", conf)
	add := func(id, namespace string, addresses ...string) {
		n.call(t, conf, call{"ADD", id, "K8S_POD_NAMESPACE=" + namespace, addresses}).want(t, 0)
	}
	for pod := range pods {
		var list []string
		for i := range each {
			list = append(list, fmt.Sprintf("10.1.%d.%d/16", 1+pod, 1+i))
		}
		add(fmt.Sprint("pod", pod), "dev", list...)
	}
	add("exempt", "prod", "10.1.200.1/16")
	n.startReconciler(t).untilReady(t)
	n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod", "dev"}})
	says := []string{"cannot be applied; the last good policy stays", "1089 addresses", "Remedy: Correct a policy"}
	var status string
	timelimit.Await(timelimit.Wait, func() bool {
		status, _, _ = n.reconciler(t, "status")
		return strings.Contains(status, says[0])
	})
	says = append(says, "IP-MASQ-AGENT  ipv4", fmt.Sprintf("Pods:        %d, of which 1 exempt by namespace", pods+1))
	if missing := lacking(status, says); len(missing) > 0 {
		t.Errorf("status does not say %q:\n%s", missing, status)
	}
	n.wantSays(t, 0, []string{"10.1.1.1: masqueraded", "agrees"}, "explain", "1.2.3.4", "--from", "10.1.1.1")
	n.wantSays(t, 0, []string{"10.1.200.1: exempt", "agrees"}, "explain", "1.2.3.4", "--from", "10.1.200.1")
	n.wantSays(t, 1, []string{"pending", says[0]}, "check")
}

// TestExemptPodsEnforced: enforceExempt binds the traffic of exempt pods to any destination, and drops no packet of theirs.
func TestExemptPodsEnforced(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}, "enableIPv6": true, "enforceExempt": true, "guard": "drop"})
		prod, dev := n.podOf(t, "prod"), n.podOf(t, "dev")
		for i := range families() {
			for _, rules := range masqueradingRules(i, n.NodeAddr(n.LAN, masqueradedDestinations[i])) {
				take := rules.loadFamily(t, n, i)
				dst := []string{"1.2.3.4", "2001:db8:5::5"}[i]
				n.exempt(t, prod, true, dst)
				to := netip.AddrPortFrom(netip.MustParseAddr(dst), topology.EchoPort)
				if seen := assert.Must(dev.SendUDP(to))(t); seen.Source.Addr() == dev.addr(to.Addr()) {
					t.Errorf("%s: not masqueraded to %s", rules.name, dst)
				}
				take()
			}
		}
	})
}

// TestDamagedRecordsOfPods: damaged records of attachments concern these alone, until their next ADD.
func TestDamagedRecordsOfPods(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		pod := func(verb, id, namespace, address string) result {
			return n.call(t, conf, call{verb, id, "K8S_POD_NAMESPACE=" + namespace, []string{address}})
		}
		pod("ADD", "a", "prod", "10.1.0.5/16").want(t, 0)
		files := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "attachments", "*", "*", "*")))(t)
		for _, file := range files {
			must(t, os.WriteFile(file, []byte("damaged"), 0o600))
		}
		must(t, os.Remove(filepath.Join(n.dataDir, "record.json")))
		pod("ADD", "b", "dev", "10.1.0.7/16").want(t, 0)
		n.exemptAddresses(t)
		pod("CHECK", "a", "prod", "10.1.0.5/16").want(t, 101)
		pod("ADD", "a", "prod", "10.1.0.5/16").want(t, 0)
		n.exemptAddresses(t, "10.1.0.5")
	})
}
