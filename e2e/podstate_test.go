// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"testing"
)

// TestLostPodState: exempt pods outlast a lost record, whoever finds it, and damaged records of attachments concern these alone.
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
