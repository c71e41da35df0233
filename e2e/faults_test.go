// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestDiskFull leaves 0 to 5 pages free on the file system of the dataDir. It checks that an ADD
// with a new document either succeeds, or fails and changes neither rules nor documents.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		const page = 4096
		disk := filepath.Join(n.dir, "disk")
		n.dataDir = filepath.Join(disk, "data")
		must(t, os.Mkdir(disk, 0o700))
		must(t, syscall.Mount("full", disk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", 16*page)))
		t.Cleanup(func() {
			if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		ballast := filepath.Join(disk, "ballast")
		fill := func(free int64) {
			t.Helper()
			f, err := os.Create(ballast)
			must(t, err)
			size := int64(0)
			for err == nil {
				_, err = f.Write(make([]byte, page))
				size += page
			}
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			must(t, errors.Join(f.Truncate(max(0, size-page-free*page)), f.Close()))
		}
		fill(0)
		first := n.conf(t, "podnet", nil)
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: first}).want(t, 100, "no space left on device", "free space or inodes on its file system")
		n.invoke(t, invocation{verb: "STATUS", conf: first}).want(t, 50, "no space left on device")
		if after := n.ruleset(t); n.backend.variant != "legacy" && after != before { // iptables-legacy creates an empty table when it is read
			t.Errorf("rules changed:\n%s", after)
		}
		must(t, os.Remove(ballast))
		n.addAndCheck(t, first)
		failures := 0
		for free := range int64(6) {
			fill(free)
			rules, documents := n.ruleset(t), n.documentStamps(t)
			// This ADD finds correct rules. It needs space only for the record of its pod, without which it warns.
			other := n.conf(t, "podnet", object{"prevResult": resultWith(fmt.Sprintf("10.1.0.%d/16", 100+free))})
			a := n.invoke(t, invocation{verb: "ADD", conf: other, id: fmt.Sprint("pod", free)}).want(t, 0)
			if warned := strings.Contains(a.stderr, "cannot record the pod: no space left on device in "+n.dataDir+"; free space or inodes"); warned != (free == 0) {
				t.Errorf("%d pages free: %s", free, a.stderr)
			}
			second := n.conf(t, "podnet", object{"enableIPv6": true, "masqChain": "SECOND", "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}})
			a = n.invoke(t, invocation{verb: "ADD", conf: second})
			if a.code == 0 {
				n.invoke(t, invocation{verb: "CHECK", conf: second}).want(t, 0)
			} else {
				failures++
				a.want(t, 100, "no space left on device")
				wantSame(t, fmt.Sprintf("rules with %d pages free", free), n.ruleset(t), rules)
				wantSame(t, fmt.Sprintf("documents with %d pages free", free), n.documentStamps(t), documents)
				n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
				n.flush(t)
				n.invoke(t, invocation{verb: "ADD", conf: first}).want(t, 0)
			}
			must(t, os.Remove(ballast))
			n.addAndCheck(t, first)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			n.wantJumps(t, "SECOND", 0, 0)
			if unknown := n.unknownFiles(t); len(unknown) > 0 {
				t.Errorf("%d pages free: unexpected files: %q", free, unknown)
			}
		}
		if failures == 0 || failures == 6 {
			t.Errorf("%d of 6 ADDs failed for lack of space, want some", failures)
		}
	})
}
