// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// published waits until the reconciler has published that the rules are right at the present generation, and returns
// what it wrote.
func (n *node) published(t *testing.T, d *daemon) (c store.VerificationCache) {
	t.Helper()
	d.until(t, "published verification", func() bool {
		c = store.Open(n.dataDir).Published()
		return strings.HasSuffix(c.Generation, fmt.Sprint(".", n.generation(t)))
	})
	return c
}

// TestPublishedVerification: after another program's commit, an ADD beside a reconciler reads no rules, and one that
// cannot rely on it does.
func TestPublishedVerification(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		n.addAndCheck(t, conf)
		d := n.startReconciler(t).untilReady(t)
		dir := store.Open(n.dataDir)
		stdout, _, _ := n.reconciler(t, "version")
		fields := strings.Fields(stdout)
		l := inProcessPlugin{node: n, version: fields[1]}
		l.add(t, conf)
		commit := func() { n.tool(t, "nft", "add table ip other; delete table ip other") }
		if n.backend.variant == "legacy" {
			commit()
			d.signal(t, syscall.SIGHUP)
			if got := dir.Published(); got != (store.VerificationCache{}) || !l.add(t, conf) {
				t.Errorf("published: %+v", got)
			}
			return
		}
		del := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Del(args) }
		check := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Check(args) }
		status := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Status(args) }
		commit()
		c := n.published(t, d)
		if l.add(t, conf) || l.checked(t, conf, del) || l.add(t, conf) {
			t.Error("reads rules beside a reconciler that verified them")
		}
		if !l.checked(t, conf, check) || !l.checked(t, conf, status) {
			t.Error("CHECK or STATUS reads no rules")
		}
		path := filepath.Join(n.dataDir, "sources")
		for _, e := range dirEntries(t, path) {
			if strings.HasPrefix(string(readFile(t, filepath.Join(path, e))), c.Entry+" ") {
				path = filepath.Join(path, e)
			}
		}
		text := readFile(t, path)
		d.signal(t, syscall.SIGSTOP)
		other := func(change func(*store.VerificationCache)) func() {
			return func() {
				changed := c
				change(&changed)
				must(t, dir.Publish(changed))
			}
		}
		number := c.Generation[strings.LastIndex(c.Generation, "."):]
		for name, spoil := range map[string]func(){
			"torn":              func() { must(t, os.WriteFile(path, text[:len(text)-3], 0o600)) },
			"empty":             func() { must(t, os.WriteFile(path, nil, 0o600)) },
			"gone":              func() { must(t, os.Remove(path)) },
			"writable":          func() { must(t, os.Chmod(path, 0o666)) },
			"other version":     other(func(c *store.VerificationCache) { c.Entry += "x" }),
			"other documents":   other(func(c *store.VerificationCache) { c.Inputs = c.Inputs[1:] + c.Inputs[:1] }),
			"other namespace":   other(func(c *store.VerificationCache) { c.Generation = "99.0" + number }),
			"earlier":           func() { commit() },
			"other addresses":   other(func(c *store.VerificationCache) { c.Addresses = "192.0.2.0/24=0" }),
			"other plugin.toml": other(func(c *store.VerificationCache) { c.Inputs = store.Digest("x") }),
		} {
			must(t, os.RemoveAll(path))
			must(t, dir.Publish(c))
			n.removeCaches(t, path)
			spoil()
			if !l.add(t, conf) {
				t.Errorf("%s: reads no rules", name)
			}
		}
		// While the reconciler is stopped, rules are changed and the former state is written again.
		n.removeCaches(t, path)
		must(t, dir.Publish(c))
		n.alter(t, "-D IP-MASQ-AGENT 1", "delete element ip ip-masq exempt-IP-MASQ-AGENT { 169.254.0.0/16 }")
		if !l.add(t, conf) { // which ends with CHECK
			t.Error("reads no rules after they were changed")
		}
		d.signal(t, syscall.SIGCONT)
		commit()
		c = n.published(t, d)

		// A changed document, which the reconciler has not seen.
		d.signal(t, syscall.SIGSTOP)
		n.storeSource(t, policy.Source{ID: networkID("other"), Order: 9, Policy: policy.SourcePolicy{Chain: policy.DefaultChain, NonMasqueradeCIDRs: prefixes("20.0.0.0/8")}})
		if !l.add(t, conf) {
			t.Error("reads no rules after a document was changed")
		}
		d.signal(t, syscall.SIGCONT)

		// One on standby publishes nothing.
		n.published(t, d)
		standby := n.startReconciler(t)
		d.signal(t, syscall.SIGSTOP)
		before := dir.Published()
		commit()
		standby.until(t, "standby", func() bool { return strings.Contains(standby.log(), "standby") })
		if now := dir.Published(); now != before {
			t.Errorf("on standby: %+v, was %+v", now, before)
		}
		d.signal(t, syscall.SIGCONT)
	})
}

// removeCaches removes what ADDs verified.
func (n *node) removeCaches(t *testing.T, published string) {
	t.Helper()
	all := topology.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.verified")))(t)
	for _, file := range all {
		if file != published {
			text := strings.Fields(string(readFile(t, file)))
			text[2] = "0.0.0" // another generation, of the same entry and documents
			must(t, os.WriteFile(file, []byte(strings.Join(text, " ")+"\n"), 0o600))
		}
	}
}

func dirEntries(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries := topology.Must(os.ReadDir(dir))(t)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
