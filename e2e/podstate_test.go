// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLostPodState: exempt pods outlast a lost record, whichever program finds it, and damaged records of attachments concern these alone.
func TestLostPodState(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		run := func(verb, id, namespace, address string) result {
			t.Helper()
			return n.call(t, conf, call{verb, id, "K8S_POD_NAMESPACE=" + namespace, []string{address + "/16"}})
		}
		n.conflist(t, "podnet", conf)
		run("ADD", "a", "prod", "10.1.0.5").want(t, 0)
		run("ADD", "b", "prod", "10.1.0.6").want(t, 0)
		record := filepath.Join(n.dataDir, "record.json")
		for name, spoil := range map[string]func() error{
			"torn":  func() error { return os.Truncate(record, 40) },
			"empty": func() error { return os.Truncate(record, 0) },
			"gone":  func() error { return os.Remove(record) },
		} {
			t.Log(name)
			must(t, spoil())
			run("ADD", "c", "dev", "10.1.0.7").want(t, 0)
			n.exemptAddresses(t, "10.1.0.5", "10.1.0.6")
			must(t, spoil())
			run("ADD", "d", "dev", "10.1.0.6").want(t, 0)
			n.exemptAddresses(t, "10.1.0.5")
			must(t, spoil())
			run("DEL", "d", "", "10.1.0.6").want(t, 0)
			run("ADD", "b", "prod", "10.1.0.6").want(t, 0)
			n.exemptAddresses(t, "10.1.0.5", "10.1.0.6")
			must(t, spoil())
			if stdout, stderr, code := n.reconciler(t, "once"); code != 0 {
				t.Errorf("once: %d\n%s%s", code, stdout, stderr)
			}
			n.exemptAddresses(t, "10.1.0.5", "10.1.0.6")
			run("CHECK", "a", "prod", "10.1.0.5").want(t, 0)
			run("CHECK", "c", "dev", "10.1.0.7").want(t, 0)
		}
		files, err := filepath.Glob(filepath.Join(n.dataDir, "attachments", "*", "*", "*"))
		must(t, err)
		for _, file := range files {
			must(t, os.WriteFile(file, []byte("damaged"), 0o600))
		}
		must(t, os.Remove(record))
		run("ADD", "c", "dev", "10.1.0.7").want(t, 0)
		n.exemptAddresses(t)
		run("CHECK", "a", "prod", "10.1.0.5").want(t, 101)
		run("ADD", "a", "prod", "10.1.0.5").want(t, 0)
		n.exemptAddresses(t, "10.1.0.5")
		if stdout, stderr, code := n.reconciler(t, "cleanup"); code != 0 {
			t.Errorf("cleanup: %d\n%s%s", code, stdout, stderr)
		}
		run("DEL", "a", "", "10.1.0.5").want(t, 0)
		if p := n.load(t).Record.Pods; len(p) > 0 {
			t.Errorf("after cleanup: %+v", p)
		}
	})
}

// TestExemptPodsOfChains: the addresses of a pod are exempt in the chains that list its namespace, in the families that are
// managed by now, and because of other keys, too.
func TestExemptPodsOfChains(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		const prod, dev = "K8S_POD_NAMESPACE=prod", "K8S_POD_NAMESPACE=dev"
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}, "nonMasqueradeSourceCIDRs": []string{"10.1.0.5/32"}, "sourceCIDRs": []string{"10.1.0.0/16"}}
		add := func(conf object, id, args string, addresses ...string) {
			t.Helper()
			n.call(t, conf, call{"ADD", id, args, addresses}).want(t, 0)
			n.call(t, conf, call{"CHECK", id, args, addresses}).want(t, 0)
		}
		n.conflist(t, "podnet", conf)
		add(conf, "a", prod, "10.1.0.5/16")
		add(conf, "b", prod, "10.1.0.6/16", "fd00:10:1::6/64")
		n.exemptAddresses(t, "10.1.0.5", "10.1.0.6", "fd00:10:1::6")
		conf["enableIPv6"], conf["sourceCIDRs"] = true, []string{"10.1.0.0/16", "fd00:10:1::/64"}
		n.conflist(t, "podnet", conf)
		add(conf, "c", "", "10.1.0.9/16")
		if stdout, stderr, _ := n.reconciler(t, "explain", "2001:db8:5::5", "--from", "fd00:10:1::6", "-o", "json"); !strings.Contains(stdout, `"verdict": "exempt"`) {
			t.Errorf("IPv6 is managed since: %s%s", stdout, stderr)
		}
		second := object{"name": "second", "masqChain": "SECOND", "nonMasqueradeNamespaces": []string{"dev"}, "sourceCIDRs": []string{"10.2.0.0/16"}}
		add(second, "d", dev, "10.2.0.7/16")
		add(conf, "e", dev, "10.1.0.7/16") // of a namespace that the other chain lists
		for from, want := range map[string]string{"10.2.0.7": "exempt", "10.1.0.7": "masquerade", "10.1.0.6": "exempt"} {
			if stdout, stderr, _ := n.reconciler(t, "explain", "1.2.3.4", "--from", from, "-o", "json"); !strings.Contains(stdout, `"verdict": "`+want+`"`) {
				t.Errorf("%s is not %s: %s%s", from, want, stdout, stderr)
			}
		}
		n.call(t, second, call{verb: "DEL", id: "d"}).want(t, 0)
		add(conf, "b", "", "10.1.0.6/16") // again, without names
		n.call(t, conf, call{verb: "GC"}).want(t, 0)
		n.call(t, conf, call{verb: "DEL", id: "e"}).want(t, 0)
		n.exemptAddresses(t, "10.1.0.5")
		must(t, os.RemoveAll(filepath.Join(n.dataDir, "attachments")))
		if stdout, stderr, code := n.reconciler(t, "once"); code != 0 || len(n.load(t).Record.Pods) > 0 {
			t.Errorf("once: %d\n%s%s", code, stdout, stderr)
		}
		n.call(t, conf, call{"CHECK", "a", prod, []string{"10.1.0.5/16"}}).want(t, 0) // by nonMasqueradeSourceCIDRs
	})
}

// TestNamespacesOfAgentFiles: a list in the agent files is about pods that run, and about those to come.
func TestNamespacesOfAgentFiles(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		add := func(id, address string) {
			t.Helper()
			n.call(t, object{}, call{"ADD", id, "K8S_POD_NAMESPACE=prod", []string{address}}).want(t, 0)
		}
		once := func(keys string, exempt ...string) {
			t.Helper()
			n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [10.0.0.0/8]\n"+keys)
			if stdout, stderr, code := n.reconciler(t, append([]string{"once"}, n.agentArgs(n.agentDir())...)...); code != 0 {
				t.Errorf("once: %d\n%s%s", code, stdout, stderr)
			}
			n.exemptAddresses(t, exempt...)
		}
		n.conflist(t, "podnet", object{})
		add("a", "10.1.0.5/16")
		once("nonMasqueradeNamespaces: [prod]\n", "10.1.0.5")
		add("b", "10.1.0.6/16")
		n.exemptAddresses(t, "10.1.0.5", "10.1.0.6")
		once("")
		once("nonMasqueradeNamespaces: [prod, dev]\n", "10.1.0.5", "10.1.0.6")
	})
}
