// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// exemptPods returns how many pods with an IPv4 address are exempt by namespace.
func (n *node) exemptPods(t *testing.T) (count int) {
	t.Helper()
	for _, p := range n.load(t).Record.Pods {
		if p.Address.Is4() {
			count++
		}
	}
	return count
}

// TestPodsBeforeTheEntry: pods that started before the plugin entry was in the conflist are known from the runtime's
// cache, and exempt if their namespace is.
func TestPodsBeforeTheEntry(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.write(t, "podnet", n.bridge("podnet"))
		prod, dev := n.podOf(t, "prod"), n.podOf(t, "dev")
		d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
		exempts := func(count int) func() bool {
			return func() bool {
				if n.exemptPods(t) != count {
					return false
				}
				_, _, code := n.reconciler(t, "check") // the record is written before the rules
				return code == 0
			}
		}
		conf := object{"nonMasqueradeNamespaces": []string{"prod"}}
		n.conflist(t, "podnet", conf)
		d.until(t, "the record", exempts(1))
		n.exempt(t, prod, true, "1.2.3.4")
		n.exempt(t, dev, false, "1.2.3.4")
		for pod, want := range map[string]string{"prod/web-0": "exempt", "dev/web-0": "masquerade"} {
			n.wantSays(t, 0, []string{`"verdict": "` + want + `"`}, "explain", "1.2.3.4", "--pod", pod, "-o", "json")
		}
		if stdout, _, _ := n.reconciler(t, "status", "-o", "json"); !strings.Contains(stdout, `"recorded": 2`) || !strings.Contains(stdout, `"exempt": 1`) {
			t.Errorf("status:\n%s", stdout)
		}

		// A pod of a runtime that has not read the conflist yet, and its end.
		current := n.cni.ConfDir
		n.cni.ConfDir = filepath.Join(n.dir, "before")
		n.write(t, "podnet", n.bridge("podnet"))
		late := n.podOf(t, "prod")
		d.until(t, "the record of a pod that appears", exempts(2))
		n.exempt(t, late, true, "1.2.3.4")
		ended := time.Now()
		succeeds(t, "DEL")(n.del(t, "podnet", late))
		d.until(t, "the end of its record", func() bool { return n.exemptPods(t) == 1 })
		if took := time.Since(ended); timelimit.Exceeded(took, 2*time.Second) {
			t.Errorf("the record lasted for %s", took)
		}
		n.cni.ConfDir = current

		// An ADD takes the address, and what was taken is not given back.
		address := prod.addrs[0].String() + "/16"
		n.call(t, conf, call{"ADD", "taker", "K8S_POD_NAMESPACE=dev", []string{address}}).want(t, 0)
		n.exempt(t, prod, false, "1.2.3.4")
		n.call(t, conf, call{verb: "DEL", id: "taker"}).want(t, 0)
		d.stop(t)
		d = n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
		n.exempt(t, prod, false, "1.2.3.4")
		d.stop(t)
	})
}
