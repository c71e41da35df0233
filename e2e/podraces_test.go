// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestPodRaces runs ADDs and DELs of pods of two namespaces at once, kills some and leaves DELs out, while the list of
// namespaces changes and a reconciler runs. An address has the verdict of the pod whose ADD returned last.
func TestPodRaces(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		const addresses, rounds = 20, 6
		listed := object{"nonMasqueradeNamespaces": []string{"prod"}}
		conf := func(address int, keys object) string {
			with := maps.Clone(keys)
			with["prevResult"] = resultWith(fmt.Sprintf("10.1.0.%d/16", address))
			return n.conf(t, "podnet", with)
		}
		n.conflist(t, "podnet", listed)
		n.invoke(t, invocation{verb: "ADD", conf: conf(200, listed), id: "first"}).want(t, 0)
		d := n.startReconciler(t).untilReady(t)
		n.conflist(t, "other", object{"nonMasqueradeNamespaces": []string{"another"}}) // an ADD makes it a source
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		var all sync.WaitGroup
		want := make([]bool, addresses)
		for i := range addresses {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			run := func(verb, id, namespace string, kill bool) {
				c := n.prepare(t, invocation{verb: verb, id: id, conf: conf(10+i, listed), args: "K8S_POD_NAMESPACE=" + namespace})
				var out bytes.Buffer
				c.Stdout, c.Stderr = &out, &out
				if err := c.Start(); err != nil {
					t.Errorf("%s: %v", verb, err)
					return
				}
				if kill {
					time.Sleep(time.Duration(random.IntN(int(10 * time.Millisecond))))
					_ = c.Process.Kill() // the process may have ended
				}
				if err := c.Wait(); err != nil && !kill {
					t.Errorf("%s: %v\n%s", verb, err, out.String())
				}
			}
			all.Go(func() {
				for round := range rounds {
					id := fmt.Sprintf("pod%d-%d", i, round)
					namespace := []string{"prod", "dev"}[random.IntN(2)]
					run("ADD", id, namespace, round < rounds-1 && random.IntN(3) == 0)
					if want[i] = namespace == "prod"; round == rounds-1 {
						return
					}
					if random.IntN(3) > 0 {
						run("DEL", id, namespace, random.IntN(4) == 0)
					}
				}
			})
		}
		all.Go(func() {
			n.invoke(t, invocation{verb: "ADD", id: "other", args: "K8S_POD_NAMESPACE=another",
				conf: n.conf(t, "other", object{"nonMasqueradeNamespaces": []string{"another"}, "prevResult": resultWith("10.1.0.9/16")})}).want(t, 0)
		})
		all.Wait()
		d.untilReady(t)
		exempt := map[string]bool{}
		for _, p := range n.load(t).Record.Pods {
			exempt[p.Address.String()] = true
		}
		for i := range addresses {
			if a := fmt.Sprintf("10.1.0.%d", 10+i); exempt[a] != want[i] {
				t.Errorf("%s: exempt %v, want %v", a, exempt[a], want[i])
			}
		}
		if !exempt["10.1.0.9"] {
			t.Error("10.1.0.9 is not exempt")
		}
		if stdout, stderr, code := n.reconciler(t, "check"); code != 0 {
			t.Errorf("check: %d\n%s%s", code, stdout, stderr)
		}
	})
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
		if n.ruleset(t) != before {
			t.Error("the rules changed")
		}
		n.call(t, conf, call{verb: "DEL", id: "pod0"}).want(t, 0)
		add(99, 1, "prod").want(t, 0)
	}
}

// TestExemptPodOnFullDisk: an ADD that cannot record a change of an exemption fails, another one warns.
func TestExemptPodOnFullDisk(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		disk := filepath.Join(n.dir, "disk")
		n.dataDir = filepath.Join(disk, "data")
		must(t, os.Mkdir(disk, 0o700))
		must(t, syscall.Mount("full", disk, "tmpfs", 0, "size=128k,mode=0700"))
		t.Cleanup(func() { _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		add := func(id, namespace, address string) result {
			return n.call(t, conf, call{"ADD", id, "K8S_POD_NAMESPACE=" + namespace, []string{address + "/16"}})
		}
		add("a", "prod", "10.1.0.5").want(t, 0)
		ballast := filepath.Join(disk, "ballast")
		if err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600); err == nil {
			t.Fatal("the disk is not full")
		}
		rules := n.ruleset(t)
		for _, c := range [][3]string{{"b", "prod", "10.1.0.6"}, {"c", "dev", "10.1.0.5"}, {"d", "prod", "10.1.0.5"}} {
			add(c[0], c[1], c[2]).want(t, 100, "no space left on device")
		}
		if a := add("e", "dev", "10.1.0.7").want(t, 0); !strings.Contains(a.stderr, "no space left on device") {
			t.Errorf("no warning: %s", a.stderr)
		}
		if n.ruleset(t) != rules {
			t.Error("the rules changed")
		}
		must(t, os.Remove(ballast))
		n.exemptAddresses(t, "10.1.0.5")
		add("d", "dev", "10.1.0.5").want(t, 0)
		n.exemptAddresses(t)
	})
}

// TestExemptPodsEnforced: enforceExempt binds the traffic of exempt pods to any destination, and drops no packet of theirs.
func TestExemptPodsEnforced(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{"nonMasqueradeNamespaces": []string{"prod"}, "enableIPv6": true, "enforceExempt": true, "guard": "drop"})
		prod, dev := n.podOf(t, "prod"), n.podOf(t, "dev")
		for i := range families() {
			for _, rules := range masqueradingRules(i, n.NodeAddr(n.LAN, masqueradedDestinations[i])) {
				take := rules.loadFamily(t, n, i)
				dst := []string{"1.2.3.4", "2001:db8:5::5"}[i]
				n.exempt(t, prod, true, dst)
				to := netip.AddrPortFrom(netip.MustParseAddr(dst), topology.EchoPort)
				if seen := topology.Must(dev.SendUDP(to))(t); seen.Source.Addr() == dev.addr(to.Addr()) {
					t.Errorf("%s: not masqueraded to %s", rules.name, dst)
				}
				take()
			}
		}
	})
}

// TestExemptPodsOfEarlierBoot: what pods were before a boot exempts nothing after it.
func TestExemptPodsOfEarlierBoot(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		n.call(t, conf, call{"ADD", "a", "K8S_POD_NAMESPACE=prod", []string{"10.1.0.5/16"}}).want(t, 0)
		boot, earlier := n.load(t).Record.Boot, "00000000-0000-4000-8000-000000000000"
		record := filepath.Join(n.dataDir, "record.json")
		must(t, os.WriteFile(record, bytes.ReplaceAll(readFile(t, record), []byte(boot), []byte(earlier)), 0o600))
		must(t, os.Rename(filepath.Join(n.dataDir, "attachments", boot), filepath.Join(n.dataDir, "attachments", earlier)))
		n.call(t, conf, call{"ADD", "b", "K8S_POD_NAMESPACE=prod", []string{"10.1.0.6/16"}}).want(t, 0)
		n.exemptAddresses(t, "10.1.0.6")
	})
}
