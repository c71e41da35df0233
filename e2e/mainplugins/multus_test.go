// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package mainplugins

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// behindMultus makes a node where Multus delegates to kindnet, with this cniVersion.
func behindMultus(t *testing.T, version string, follows bool) (*node, *Multus, Writer) {
	t.Helper()
	master := Writers()[0]
	master.Conflist = strings.Replace(master.Conflist, master.version(), version, 1)
	n := newNode(t, version, "")
	must(t, master.Start(n.Path(confDir)))
	m := &Multus{Dir: n.Path(confDir), Follows: follows}
	must(t, m.Start())
	return n, m, master
}

// follow lets Multus take over what its master says: within a second, or by a restart.
func follow(t *testing.T, m *Multus) {
	t.Helper()
	if m.Follows {
		must(t, m.Tick())
	} else {
		must(t, m.Start())
	}
}

// TestMultus installs ip-masq behind thin Multus, restarts Multus and the program that writes its
// master, and uninstalls ip-masq.
func TestMultus(t *testing.T) {
	for _, version := range []string{"0.3.1", "1.0.0"} {
		for _, follows := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s follows %t", version, follows), func(t *testing.T) {
				t.Parallel()
				n, m, master := behindMultus(t, version, follows)
				generated := "00-multus.conf"
				if version == "1.0.0" {
					generated += "list"
				}
				n.pod(t, "before", false)
				n.run(t)
				n.untilEntry(t, master.File)
				n.untilUnready(t, 5*time.Second, "conflist: ", generated, "copy of network kindnet without the plugin entry")
				follow(t, m)
				n.untilReady(t)
				n.untilHealthy(t)
				n.pod(t, "between", true)
				for i := range restarts {
					must(t, master.Start(n.Path(confDir)))
					n.untilEntry(t, master.File)
					follow(t, m)
					n.untilReady(t)
					must(t, m.Stop())
					n.pod(t, fmt.Sprint("stopped", i), true)
					must(t, m.Start())
					n.untilReady(t)
					if copies := n.entries(generated); copies != 1 {
						t.Errorf("%d plugin entries in %s", copies, generated)
					}
				}
				n.pod(t, "restarted", true)
				n.untilHealthy(t)
				n.packets(t, true)

				must(t, n.reconciler.Stop(10*time.Second))
				n.wantUninstall(t, nil, 1, "it is named in "+confDir+"/"+generated, "restart Multus")
				follow(t, m)
				n.wantUninstall(t, nil, 1, "/var/lib/cni/multus/", "drain the node")
				n.packets(t, true)
				n.endPods(t)
				if follows {
					// Pods started without Multus and ended with it: containerd keeps their results.
					n.wantUninstall(t, nil, 1, "/var/lib/cni/results/kindnet-", "--no-wait")
					n.wantUninstall(t, []string{"--no-wait"}, 0)
				} else {
					n.wantUninstall(t, nil, 0)
				}
				n.wantGone(t, master.File, master.Conflist)
				n.pod(t, "after", false)
				n.endPods(t)
			})
		}
	}
}

// wantUninstall uninstalls ip-masq with this exit code.
func (n *node) wantUninstall(t *testing.T, args []string, want int, says ...string) {
	t.Helper()
	output, code := n.command(t, append([]string{"uninstall"}, args...)...)
	if code != want {
		t.Errorf("uninstall: exit code %d, want %d: %s", code, want, output)
	}
	assert.Contains(t, "uninstall", output, says...)
}
