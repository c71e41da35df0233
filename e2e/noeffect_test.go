// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// TestNoEffect checks that ADD, doctor and explain say that ip-masq has no effect behind a main plugin whose packets pass no hook of
// the node, and that nothing fails because of it.
func TestNoEffect(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := n.conf(t, "podnet", nil)
	dir := n.own(config.DefaultCNIConfDir)
	must(t, os.MkdirAll(dir, 0o755))
	for _, c := range []struct {
		main     string
		noEffect bool
	}{
		{`{"type": "macvlan", "master": "eth0"}`, true},
		{`{"type": "ipvlan", "mode": "l3"}`, true},
		{`{"type": "ipvlan", "mode": "l3s"}`, false},
		{`{"type": "sriov"}, {"type": "tuning"}`, true},
		{`{"type": "host-device", "device": "eth1"}`, true},
		{`{"type": "ptp"}`, false},
	} {
		list := `{"cniVersion": "1.1.0", "name": "podnet", "plugins": [` + c.main + `, {"type": "ip-masq"}]}`
		must(t, os.WriteFile(filepath.Join(dir, "10-podnet.conflist"), []byte(list), 0o600))
		for range 2 { // the second one finds what the first one verified
			add := n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
			const says = "usually pass no hook of the node, so ip-masq has no effect on them"
			if strings.Contains(add.stderr, says) != c.noEffect {
				t.Errorf("behind %s, ADD says\n%s", c.main, add.stderr)
			}
		}
		stdout, _, _ := n.byHand(t, "doctor", "--data-dir", n.dataDir, "--cni-conf-dir", dir)
		if strings.Contains(stdout, "notice: no-effect") != c.noEffect {
			t.Errorf("behind %s, doctor says\n%s", c.main, stdout)
		}
		flags := []string{"explain", "8.8.8.8", "--from", "10.1.0.2", "--data-dir", n.dataDir, "--cni-conf-dir", dir}
		stdout, _, _ = n.byHand(t, flags...)
		if strings.Contains(stdout, "masqueraded, but ip-masq usually has no effect behind") != c.noEffect {
			t.Errorf("behind %s, explain says\n%s", c.main, stdout)
		}
		stdout, _, _ = n.byHand(t, append(flags, "-o", "json")...)
		if strings.Contains(stdout, `"kernel": null`) != c.noEffect {
			t.Errorf("behind %s, explain -o json says\n%s", c.main, stdout)
		}
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
	}
}
