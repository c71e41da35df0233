// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// serving is the time that a container may take to listen.
const serving = 5 * time.Second

// TestStatus breaks and repairs a node's backend. It checks that a runtime that calls STATUS
// reports the node as not ready before any ADD fails, and that otherwise the ADD's error has the
// same reason.
func TestStatus(t *testing.T) {
	breaks := map[string]struct {
		form  form
		says  []string
		spoil func(*testing.T, *criNode)
		mend  func(*testing.T, *criNode)
	}{
		"no iptables": {forms()[1], []string{"chain IP-MASQ-AGENT", "install iptables"},
			func(t *testing.T, n *criNode) { n.noPrograms(t) },
			func(t *testing.T, n *criNode) { n.programs(t) },
		},
		"state read-only": {forms()[0], []string{"read-only file system", dataDir},
			func(t *testing.T, n *criNode) {
				must(t, os.Mkdir(n.Path(dataDir), 0o700))
				must(t, n.Enclose(func() error {
					if err := unix.Mount("ro", dataDir, "tmpfs", unix.MS_RDONLY, "mode=700"); err != nil {
						return err
					}
					return nil
				}))
			},
			func(t *testing.T, n *criNode) {
				must(t, n.Enclose(func() error { return unix.Unmount(dataDir, unix.MNT_DETACH) }))
			},
		},
	}
	for name, b := range breaks {
		t.Run(name, func(t *testing.T) {
			onEvery(t, []form{b.form}, func(t *testing.T, n *criNode) {
				n.conflist(t, bridge(), n.entry(prefixes()))
				n.ready(t, true)
				b.spoil(t, n)
				if n.version == "1.1.0" {
					wantSays(t, n.ready(t, false).Message, b.says...)
				} else if c, err := n.NetworkReady(within(t)); err != nil || !c.Status {
					t.Errorf("the runtime does not call STATUS but reports %+v %v", c, err)
				}
				if p, err := n.RunPod(within(t), "early"); err == nil {
					t.Errorf("a pod runs: %v", p.Addrs)
				} else {
					wantSays(t, err.Error(), b.says...)
				}
				b.mend(t, n)
				n.ready(t, true)
				p := n.pod(t, "pod")
				n.firstPackets(t, p)
				n.end(t, p)
				n.wantAttachments(t, 0)
			})
		})
	}
}
