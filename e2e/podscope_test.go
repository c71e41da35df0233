// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
)

// TestScopeMatchesNothing checks that doctor names a policy that can never apply, by the interfaces of the node and the
// addresses of pods on record, and that it is no fault.
func TestScopeMatchesNothing(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		keys object
		says []string // nil for no finding
	}{
		"interfaces that the node lacks": {object{"outputInterfaces": []string{"ens5", "tun+"}},
			[]string{"problem: scope-matches-nothing", "ens5, tun+", "lan, outside"}},
		"one that it has": {keys: object{"outputInterfaces": []string{"ens5", "out+"}}},
		"sources that no pod has": {object{"sourceCIDRs": []string{"10.244.0.0/16"}},
			[]string{"problem: scope-matches-nothing", "sourceCIDRs", "10.244.0.0/16", "10.1.0.2"}},
		"sources that a pod has": {keys: object{"sourceCIDRs": []string{"10.244.0.0/16", "10.1.0.0/16"}}},
		"pod ranges that no pod has": {object{"podCIDRs": []string{"10.244.0.0/16"}, "guard": "count"},
			[]string{"problem: scope-matches-nothing", "podCIDRs", "10.244.0.0/16", "10.1.0.2"}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.addAndCheck(t, n.conf(t, "podnet", c.keys))
			stdout, stderr, code := n.byHand(t, "doctor", "--data-dir", n.dataDir)
			if code != 0 {
				t.Errorf("doctor: exit code %d\n%s", code, stderr)
			}
			wantText(t, "doctor", stdout, c.says...)
			if c.says == nil {
				wantNoText(t, "doctor", stdout, "scope-matches-nothing")
			}
			wantNoText(t, "doctor", stdout, "fault: ")
		})
	}
}

// TestPodsWithWholeAddressMasks checks that doctor finds traffic between pods that is masqueraded although no subnet shows
// the pod network, as with Calico.
func TestPodsWithWholeAddressMasks(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	pod := func(id, address string) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"192.168.0.0/16"}, "prevResult": resultWith(address)})
		n.invoke(t, invocation{verb: "ADD", conf: conf, id: id}).want(t, 0)
	}
	doctor := func() string {
		stdout, _, _ := n.byHand(t, "doctor", "--data-dir", n.dataDir)
		return stdout
	}
	pod("a", "10.42.0.5/32")
	wantNoText(t, "doctor with one pod", doctor(), "pod-network-not-exempt")
	pod("b", "10.42.0.6/32")
	wantText(t, "doctor", doctor(), "problem: pod-network-not-exempt", `traffic between pods of network "podnet": to 10.42.0.5, 10.42.0.6`)
}

func wantNoText(t *testing.T, what, text, part string) {
	t.Helper()
	if strings.Contains(text, part) {
		t.Errorf("%s has %q:\n%s", what, part, text)
	}
}
