// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// withoutLockLimit is the time limit of a call that does not wait for the lock. It is far below the
// plugin's lock timeout.
const withoutLockLimit = 4 * time.Second

// tracePrograms returns a PATH with scripts that log each call and run the program of the node's
// backend. For nftables these are the programs of iptables-nft.
func (n *node) tracePrograms(t *testing.T) (path, log string) {
	t.Helper()
	path, log = filepath.Join(n.dir, "traps"), filepath.Join(n.dir, "called")
	must(t, os.Mkdir(path, 0o755))
	variant := n.backend.variant
	if variant == "" {
		variant = "nft"
	}
	programs := map[string]string{"nft": "nft", "conntrack": "conntrack", "ipset": "true"}
	for _, f := range families() {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, v := range []string{"", "-" + variant} {
				programs[f[0]+v+suffix] = f[0] + "-" + variant + suffix
			}
		}
	}
	for name, program := range programs {
		target, err := exec.LookPath(program)
		if err != nil {
			t.Fatalf("%v (`make packages` installs it)", err)
		}
		script := fmt.Sprintf("#!/bin/sh\necho %s \"$@\" >> %s\nexec %s \"$@\"\n", name, log, target)
		must(t, os.WriteFile(filepath.Join(path, name), []byte(script), 0o755))
	}
	return path, log
}

// tracedCalls returns the calls since the last call of tracedCalls.
func tracedCalls(t *testing.T, log string) []string {
	t.Helper()
	text, err := os.ReadFile(log)
	if os.IsNotExist(err) {
		return nil
	}
	must(t, err)
	must(t, os.Remove(log))
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// holdLock takes the lock of the node's dataDir as another process does.
func (n *node) holdLock(t *testing.T) (release func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(n.dataDir, "lock"), os.O_RDWR, 0)
	must(t, err)
	// A program that another test starts has a lock of this process until its exec.
	if !timelimit.Await(timelimit.Wait, func() bool {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		return err == nil
	}) {
		t.Fatalf("take the lock: %v", err)
	}
	release = sync.OnceFunc(func() { _ = f.Close() })
	t.Cleanup(release)
	return release
}

// documentStamps returns the inode and modification time of each document and of the record.
func (n *node) documentStamps(t *testing.T) string {
	t.Helper()
	paths := topology.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t)
	var b strings.Builder
	for _, path := range append(paths, filepath.Join(n.dataDir, "record.json")) {
		info := topology.Must(os.Stat(path))(t)
		stat := info.Sys().(*syscall.Stat_t)
		fmt.Fprintln(&b, path, stat.Ino, stat.Ctim) // a new document can have the time of the former one
	}
	return b.String()
}

// TestIdempotence checks that the verbs take no lock, write no rule and no document and run no
// program on nf_tables while the rules are correct. ADD, DEL and GC change only attachments.
func TestIdempotence(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		path, log := n.tracePrograms(t)
		conf := n.conf(t, "podnet", object{"enableIPv6": true, "masqueradeCIDRs": []string{"10.9.0.0/16", "fd00:9::/32"},
			"toPorts": "1024-29999,32768-65535", "sourceCIDRs": []string{"10.1.0.0/16", "fd00:1::/64"}, "outputInterfaces": []string{"lan", "out+"}})
		n.storeSource(t, agentFilesSource(func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "192.0.2.0/24") }))
		n.addThirdPartyRules(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf, path: path}).want(t, 0)
		made := tracedCalls(t, log)
		if restored := strings.Contains(strings.Join(made, " "), "-restore"); restored != (n.backend.variant != "") {
			t.Fatalf("the first ADD ran %q", made) // otherwise the trace is broken
		}
		n.addAndCheck(t, conf)
		n.holdLock(t)
		documents, rules, generation, attached := n.documentStamps(t), n.ruleset(t), n.generation(t), n.attachments(t, "podnet")
		for _, verb := range []string{"ADD", "ADD", "CHECK", "STATUS", "DEL", "GC"} {
			a := n.invoke(t, invocation{verb: verb, conf: conf, path: path, id: "another"}).want(t, 0)
			a.noWarnings(t)
			if timelimit.Exceeded(a.took, withoutLockLimit) {
				t.Errorf("%s took %v while the lock was held", verb, a.took)
			}
			want := attached
			if verb == "ADD" {
				want++
			}
			if verb != "CHECK" && verb != "STATUS" {
				n.wantAttachments(t, "podnet", want)
			}
			wantFewPrograms(t, n, verb, tracedCalls(t, log))
		}
		wantSame(t, "generation", n.generation(t), generation)
		wantSame(t, "rules", n.ruleset(t), rules)
		wantSame(t, "documents", n.documentStamps(t), documents)
	})
}

// wantFewPrograms fails the test if a verb ran programs. For iptables-legacy it allows one listing
// per family.
func wantFewPrograms(t *testing.T, n *node, verb string, calls []string) {
	t.Helper()
	if n.backend.variant != "legacy" {
		if len(calls) > 0 {
			t.Errorf("%s ran %q", verb, calls)
		}
		return
	}
	if len(calls) > len(families()) || strings.Contains(strings.Join(calls, " "), "-restore") {
		t.Errorf("%s ran %q", verb, calls)
	}
}
