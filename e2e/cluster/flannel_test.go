// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Changes to flannel's manifest, pairs of a text and its replacement.
var (
	withoutMasq         = []string{"        - --ip-masq\n", ""}
	withoutDelegateMasq = []string{`"isDefaultGateway": true`, `"isDefaultGateway": true, "ipMasq": false`}
	withNFTables        = []string{`"EnableNFTables": false`, `"EnableNFTables": true`}
	// withEntry adds a plugin entry, as for a main plugin that overwrites its conflist all the time.
	withEntry = []string{`            "portMappings": true
          }
        }
`, `            "portMappings": true
          }
        },
        {"type": "ip-masq", "backend": "nftables", "enforceExempt": true, "podCIDRs": ["10.244.0.0/16"]}
`}
)

// TestFlannel runs flannel as the main plugin, with its own manifest, and the project's DaemonSet:
// beside flanneld's masquerade rules and instead of them. flannel is restarted, which overwrites the
// conflist, and the project is taken away. Pods start before, in between and after.
func TestFlannel(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "iptables", NoNetwork: true})
	k := &flannelTest{Cluster: c, flannel: c.NewFlannel(t), early: map[*cluster.Node]netip.Addr{}}
	must(t, k.flannel.Apply(ctx))
	must(t, c.AwaitReady(ctx))
	for _, n := range c.Nodes {
		must(t, c.Start(ctx, cluster.Pod{Name: "early-" + n.Name, Node: n, Args: cluster.Serving(n.Name)}))
		k.early[n] = assert.Must(c.AwaitRunning(ctx, "early-"+n.Name))(t)
	}
	route := assert.Must(c.Nodes[0].Output(ctx, "ip", "route", "get", k.early[c.Nodes[1]].String()))(t)
	if !strings.Contains(route, "dev flannel.1") {
		t.Errorf("pods of the other node are not reached through flannel's VXLAN: %s", route)
	}
	t.Run("beside --ip-masq", k.beside)
	t.Run("instead of --ip-masq", k.instead)
}

// flannelTest is a cluster with flannel and a pod on each node that answers with the node's name.
type flannelTest struct {
	*cluster.Cluster
	flannel *cluster.Flannel
	early   map[*cluster.Node]netip.Addr
	late    int // pods that started in between
}

// beside leaves flanneld's rules in place. They come first, so the LAN sees nodes in spite of the
// policy, unless it has enforceExempt.
func (k *flannelTest) beside(t *testing.T) {
	lan, outside := k.World.LAN, k.World.Outside
	k.expect(t, lan, outside)
	rollOut(t, k.Cluster, "base", "ip-masq")
	k.expectEntry(t)
	k.startLate(t)
	k.expect(t, lan, outside)
	remedy := `write "ipMasq": false into its delegate (ConfigMap kube-flannel-cfg), run flanneld without --ip-masq, then reboot`
	k.expectDoctor(t, "problem: foreign-masquerade", "-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4",
		"192.168.0.0/16, which IP-MASQ-AGENT exempts", remedy)
	for range 3 {
		k.restart(t, k.flannel.Restart)
		k.startLate(t)
		k.expect(t, lan, outside)
	}

	k.restart(t, k.applying(withNFTables))
	k.expectDoctor(t, "problem: foreign-masquerade", "table flannel-ipv4, chain postrtg: ip saddr 10.244.0.0/16 ip daddr != 224.0.0.0/4", remedy)
	k.expect(t, lan, outside)

	k.restart(t, k.applying(withEntry))
	k.startLate(t)
	k.expect(t, outside)
	// flannel's ConfigMap has another entry than the DaemonSet's.
	if text := k.doctor(t, k.Nodes[0]); strings.Count(text, "problem:") != 1 || !strings.Contains(text, "problem: entry-differs\n") {
		t.Errorf("with enforceExempt doctor finds other problems than the entry:\n%s", text)
	}

	k.restart(t, k.applying())
	k.startLate(t)
	k.uninstall(t)
	k.startLate(t)
	k.expect(t, lan, outside)
	k.deleteLate(t)
}

// instead lets the project take over from flanneld, as docs/migrate.md has it.
func (k *flannelTest) instead(t *testing.T) {
	ctx := t.Context()
	lan, outside := k.World.LAN, k.World.Outside
	rollOut(t, k.Cluster, "base", "ip-masq")
	k.expect(t, lan, outside)

	// Neither change alters a packet in this order: flanneld leaves its rules behind.
	k.restart(t, k.applying(withoutDelegateMasq))
	k.startLate(t)
	k.expect(t, lan, outside)
	k.restart(t, k.applying(withoutMasq, withoutDelegateMasq))
	k.startLate(t)
	k.expect(t, lan, outside)

	// Without the change of the delegate flannel's plugin makes bridge masquerade, even between nodes.
	k.restart(t, k.applying(withoutMasq))
	k.startLate(t)
	first, second := k.Nodes[0], k.Nodes[1]
	expect(t, "late", k.FromPod(fmt.Sprintf("late-%d-%s", k.late, first.Name)), want{k.early[second], cluster.PeerPort, second.Name, first.Pods.Addr()})
	k.expectDoctor(t, "problem: foreign-masquerade", "-A FLANNEL-POSTRTG", "-A CNI-")

	k.restart(t, k.applying(withoutMasq, withoutDelegateMasq))
	for _, n := range k.Nodes {
		must(t, n.Run(t.Context(), "sh", "-ec", `iptables -t nat -D POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
		iptables -t nat -F FLANNEL-POSTRTG
		iptables -t nat -X FLANNEL-POSTRTG`))
	}
	k.deleteLate(t)
	k.startLate(t)
	k.expect(t, outside)
	k.expectDoctor(t, "No faults, problems or notices.")

	s := &streams{Cluster: k.Cluster, recorder: k.Record(t), began: time.Now(), to: []netip.Addr{lan.Addrs[0], outside.Addrs[0]}}
	for _, n := range k.Nodes {
		must(t, k.Start(ctx, s.pod("stream-"+n.Name, n)))
		s.awaitFrom(t, n.Pods, s.began)
	}
	for range 3 {
		k.restart(t, k.flannel.Restart)
		k.startLate(t)
		k.expect(t, outside)
	}
	for _, n := range k.Nodes {
		s.awaitFrom(t, n.Pods, time.Now())
	}
	s.expectRight(t)
	t.Logf("%d packets, each from the right address", len(s.recorder.Since(s.began)))
	must(t, k.Delete(ctx, "stream-"+first.Name, "stream-"+second.Name))

	k.uninstall(t)
	k.startLate(t)
	k.expect(t)
	k.deleteLate(t)
}

// applying returns a function that applies flannel's manifest with changes.
func (k *flannelTest) applying(changes ...[]string) func(context.Context) error {
	return func(ctx context.Context) error { return k.flannel.Apply(ctx, slices.Concat(changes...)...) }
}

// restart replaces flannel's pods, which overwrites the conflists, and waits for the plugin entry.
func (k *flannelTest) restart(t *testing.T, replace func(context.Context) error) {
	t.Helper()
	before := k.inodes(t)
	must(t, replace(t.Context()))
	for i, inode := range k.inodes(t) {
		if inode == before[i] {
			t.Errorf("flannel on %s did not overwrite its conflist", k.Nodes[i].Name)
		}
	}
	k.expectEntry(t)
}

func (k *flannelTest) inodes(t *testing.T) (inodes []uint64) {
	t.Helper()
	for _, n := range k.Nodes {
		info := assert.Must(os.Stat(n.Path(cluster.FlannelConflist)))(t)
		inodes = append(inodes, info.Sys().(*syscall.Stat_t).Ino)
	}
	return inodes
}

// expectEntry waits until each node's conflist is flannel's with one plugin entry at its end.
func (k *flannelTest) expectEntry(t *testing.T) {
	t.Helper()
	type list struct {
		CNIVersion, Name string
		Plugins          []map[string]any
	}
	isEntry := func(plugin map[string]any) bool { return plugin["type"] == "ip-masq" }
	var want list
	must(t, json.Unmarshal([]byte(assert.Must(k.flannel.Conflist(t.Context()))(t)), &want))
	want.Plugins = slices.DeleteFunc(want.Plugins, isEntry)
	for _, n := range k.Nodes {
		must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
			text, err := os.ReadFile(n.Path(cluster.FlannelConflist))
			var got list
			if err = errors.Join(err, json.Unmarshal(text, &got)); err != nil {
				return err
			}
			last := len(got.Plugins) - 1
			if last < 0 || !isEntry(got.Plugins[last]) {
				return fmt.Errorf("%s on %s has no plugin entry at its end: %s", cluster.FlannelConflist, n.Name, text)
			}
			got.Plugins = got.Plugins[:last]
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("%s on %s differs from flannel's (-flannel's +got):\n%s", cluster.FlannelConflist, n.Name, diff)
			}
			return nil
		}))
	}
}

// uninstall takes the project away. The conflists must be as flannel wrote them.
func (k *flannelTest) uninstall(t *testing.T) {
	t.Helper()
	takeDown(t, k.Cluster, "base")
	rollOut(t, k.Cluster, "uninstall", "ip-masq-uninstall")
	takeDown(t, k.Cluster, "uninstall")
	want := assert.Must(k.flannel.Conflist(t.Context()))(t)
	for _, n := range k.Nodes {
		got := assert.Must(os.ReadFile(n.Path(cluster.FlannelConflist)))(t)
		assert.Equal(t, cluster.FlannelConflist+" on "+n.Name, string(got), want)
	}
}

// startLate starts a pod on each node that stays.
func (k *flannelTest) startLate(t *testing.T) {
	t.Helper()
	k.late++
	var pods []cluster.Pod
	for _, n := range k.Nodes {
		pods = append(pods, cluster.Pod{Name: fmt.Sprintf("late-%d-%s", k.late, n.Name), Node: n})
	}
	must(t, k.Start(t.Context(), pods...))
}

// deleteLate deletes the pods that have started in between.
func (k *flannelTest) deleteLate(t *testing.T) {
	t.Helper()
	var pods struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	must(t, k.Get(t.Context(), &pods, "pods"))
	var names []string
	for _, p := range pods.Items {
		if strings.HasPrefix(p.Metadata.Name, "late-") {
			names = append(names, p.Metadata.Name)
		}
	}
	must(t, k.Delete(t.Context(), names...))
	k.late = 0
}

// expect checks the packets of the early pods and of the last ones: only these hosts see the node
// instead of the pod; pods of the other node never do.
func (k *flannelTest) expect(t *testing.T, masqueraded ...*topology.Host) {
	t.Helper()
	ctx := t.Context()
	wants := func(n *cluster.Node, pod netip.Addr) (wants []want) {
		for other, address := range k.early {
			if other != n {
				wants = append(wants, want{address, cluster.PeerPort, other.Name, pod})
			}
		}
		for _, host := range []*topology.Host{k.World.LAN, k.World.Outside} {
			source := pod
			if slices.Contains(masqueraded, host) {
				source = n.Address
			}
			wants = append(wants, want{host.Addrs[0], topology.EchoPort, host.Name, source})
		}
		return wants
	}
	for n, address := range k.early {
		expect(t, "early-"+n.Name, k.FromPod("early-"+n.Name), wants(n, address)...)
		if k.late > 0 {
			name := fmt.Sprintf("late-%d-%s", k.late, n.Name)
			expect(t, name, k.FromPod(name), wants(n, assert.Must(k.AwaitRunning(ctx, name))(t))...)
		}
	}
}

// doctor returns what doctor says on a node.
func (k *flannelTest) doctor(t *testing.T, n *cluster.Node) string {
	t.Helper()
	pod := assert.Must(k.Kubectl(t.Context(), "get", "pods", "-n", "kube-system", "-l", "app.kubernetes.io/name=ip-masq",
		"--field-selector=spec.nodeName="+n.Name, "-o", "name"))(t)
	return assert.Must(k.Kubectl(t.Context(), "exec", "-n", "kube-system", strings.TrimSpace(pod), "--", "/ip-masq-reconciler", "doctor"))(t)
}

// expectDoctor fails the test unless doctor says these texts on every node.
func (k *flannelTest) expectDoctor(t *testing.T, texts ...string) {
	t.Helper()
	for _, n := range k.Nodes {
		if got := k.doctor(t, n); !containsAll(got, texts...) {
			t.Errorf("doctor on %s says not all of %q:\n%s", n.Name, texts, got)
		}
	}
}
