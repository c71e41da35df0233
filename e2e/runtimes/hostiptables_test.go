// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// lacks is the remedy in the message for a missing iptables.
const lacks = "install iptables, use the image whose tag ends in -iptables, or add the directory that holds it"

// imageDir is the directory of the programs in the reconciler's image.
const imageDir = "/opt/cni/image"

// flush removes all rules.
func (n *node) flush(t *testing.T) {
	t.Helper()
	script := "nft flush ruleset"
	if n.form.variant == "legacy" {
		script = "for i in iptables ip6tables; do $i-legacy -t nat -F; $i-legacy -t nat -X; done"
	}
	if output, code := n.ended(t, nil, "sh", "-c", script); code != 0 {
		t.Fatal(output)
	}
}

// TestHostWithoutIptables has iptables only in the reconciler's image. It checks that pods start
// with the right verdict from their first packet on, and that a pod whose entry requires iptables
// fails with the remedy.
func TestHostWithoutIptables(t *testing.T) {
	for _, f := range forms()[1:] {
		for _, backend := range []string{"auto", "iptables"} {
			t.Run(f.name+"/"+backend, func(t *testing.T) {
				n := newNode(t, f)
				keys := prefixes()
				keys["backend"] = backend
				n.conflist(t, bridge(), n.entry(keys))
				must(t, os.Rename(n.Path(programDir), n.Path(imageDir)))
				must(t, errors.Join(os.RemoveAll(n.Path(programDir)), os.Mkdir(n.Path(programDir), 0o755)))
				if backend == "auto" {
					early := n.crioRun(t, "early")
					n.verdicts(t, early.Host, early.addrs)
					n.crioStop(t, early)
					// The reconciler does not move rules that are in sync.
					n.flush(t)
				} else {
					n.crioLacks(t)
				}
				r := n.reconciler(t, imageDir)
				n.soonReady(t, r)
				for i := range 3 {
					p := n.crioRun(t, fmt.Sprint("pod", i))
					n.verdicts(t, p.Host, p.addrs)
					n.flush(t)
					if f.variant == "legacy" && backend == "iptables" { // which has no events
						must(t, r.Signal(unix.SIGHUP))
					}
					if f.variant == "nft" || backend == "iptables" || i > 0 { // else the next ADD repairs
						until(t, serving, "repair", func() bool { return strings.Contains(n.rules(t), "IP-MASQ-AGENT") })
					}
				}
				n.soonReady(t, r)
				if moves := strings.Count(r.Output(), "managing chains"); moves > 2 {
					t.Errorf("the chains were moved %d times:\n%s", moves-1, r.Output())
				}
			})
		}
	}
}

// TestReconcilerWithoutIptables has iptables only on the host.
func TestReconcilerWithoutIptables(t *testing.T) {
	for _, f := range forms()[1:] {
		for _, backend := range []string{"auto", "iptables"} {
			t.Run(f.name+"/"+backend, func(t *testing.T) {
				n := newNode(t, f)
				keys := prefixes()
				keys["backend"] = backend
				n.conflist(t, bridge(), n.entry(keys))
				early := n.crioRun(t, "early")
				n.verdicts(t, early.Host, early.addrs)
				r := n.reconciler(t, imageDir, "--resync-interval", "1s")
				n.lacking(t, r) // the rules are in sync, but the reconciler could not repair them
				for i := range 2 {
					n.flush(t)
					n.lacking(t, r)
					p := n.crioRun(t, fmt.Sprint("pod", i))
					n.verdicts(t, p.Host, p.addrs)
					n.verdicts(t, early.Host, early.addrs)
					n.lacking(t, r)
				}
				log := r.Output()
				if moves := strings.Count(log, "managing chains"); moves > 1 {
					t.Errorf("the chains were moved:\n%s", log)
				}
				assert.Contains(t, "log", log, lacks)
			})
		}
	}
}

// lacking waits until the node is not ready because iptables is missing.
func (n *node) lacking(t *testing.T, r *reconciler) {
	t.Helper()
	until(t, serving, "unreadiness", func() bool {
		code, body := r.ready(t)
		return code == 503 && strings.Contains(body, lacks)
	})
}

// crioLacks runs an ADD that must fail because iptables is missing.
func (n *node) crioLacks(t *testing.T) {
	t.Helper()
	n.netns(t, "add", "early")
	output, code := n.crio(t, "run", "early", "/run/netns/early")
	if code == 0 {
		t.Error("without iptables, and without rules, a pod runs")
	}
	assert.Contains(t, "output", output, "chain IP-MASQ-AGENT", lacks)
}

func (n *node) soonReady(t *testing.T, r *reconciler) {
	t.Helper()
	until(t, serving, "readiness", func() bool {
		code, _ := r.ready(t)
		return code == 200
	})
}
