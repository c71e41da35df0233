// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// scripts writes scripts with these names and commands into a directory, which it returns.
func (n *node) scripts(t *testing.T, commands map[string]string) string {
	t.Helper()
	dir := filepath.Join(n.dir, "scripts")
	must(t, os.MkdirAll(dir, 0o755))
	for name, text := range commands {
		must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o755))
	}
	return dir
}

func lookPath(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	must(t, err)
	return path
}

// TestProgramIsAsked checks that an ADD that has to write asks the program through go-iptables: for the rules of POSTROUTING,
// before it chooses the backend, and to delete a jump.
func TestProgramIsAsked(t *testing.T) {
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		path, log := n.tracePrograms(t)
		conf := n.conf(t, "podnet", nil)
		list := "iptables-" + n.backend.variant + " -t nat -S POSTROUTING --wait 5"
		n.feed(t, "*nat\n-A POSTROUTING -p udp -j RETURN\nCOMMIT\n", "iptables-"+n.backend.variant+"-restore", "--noflush")
		add := invocation{verb: "ADD", conf: conf, path: path}
		n.invoke(t, add).want(t, 0).noWarnings(t)
		if calls := tracedCalls(t, log); !slices.Contains(calls, list) {
			t.Errorf("the first ADD ran %q", calls)
		}
		n.invoke(t, add).want(t, 0).noWarnings(t)
		if calls := tracedCalls(t, log); len(calls) > 0 {
			t.Errorf("an ADD with correct rules ran %q", calls)
		}
		n.feed(t, "*nat\n-A POSTROUTING -m mark --mark 0x1 -j IP-MASQ-AGENT\nCOMMIT\n", "iptables-"+n.backend.variant+"-restore", "--noflush")
		n.invoke(t, add).want(t, 0).noWarnings(t)
		if calls := tracedCalls(t, log); !slices.Contains(calls, list) {
			t.Errorf("an ADD with a jump to delete ran %q", calls)
		}
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
	})
}

// TestHangingProgram checks that an ADD ends at the limit of a program that hangs, with code 11, that another ADD does not
// wait meanwhile, and that neither leaves a process behind.
func TestHangingProgram(t *testing.T) {
	t.Parallel()
	const limit = time.Minute
	n := newNode(t, backends()[1])
	marker := filepath.Join(n.dir, "hangs")
	path := n.scripts(t, map[string]string{
		"iptables": "[ \"$1\" != --version ] || exec echo 'iptables v1.8.9 (nf_tables)'\n" +
			"sh -c 'while :; do sleep 1; done' " + marker + " & wait",
	})
	add := func(id string) invocation {
		return invocation{verb: "ADD", conf: n.conf(t, "podnet", object{"backend": "auto"}), path: path, id: id, isSlow: true}
	}
	type outcome struct {
		result
		took time.Duration
	}
	first := make(chan outcome)
	go func() {
		start := time.Now()
		r := n.invoke(t, add("first"))
		first <- outcome{r, time.Since(start)}
	}()
	if !timelimit.Await(timelimit.Wait, func() bool { return len(processesWith(t, marker)) > 0 }) {
		t.Fatal("the program does not run")
	}
	time.Sleep(5 * time.Second) // any program ends within that time
	start := time.Now()
	n.invoke(t, add("second")).want(t, 11, filepath.Join(path, "iptables"), "hangs")
	if took := time.Since(start); timelimit.Exceeded(took, 2*time.Second) {
		t.Errorf("the second ADD took %v", took)
	}
	end := <-first
	end.want(t, 11, filepath.Join(path, "iptables"), "did not end within 1m0s")
	if timelimit.Exceeded(end.took, limit+5*time.Second) {
		t.Errorf("the first ADD took %v", end.took)
	}
	if left := processesWith(t, marker); len(left) > 0 {
		t.Errorf("processes are left: %q", left)
	}
}

// processesWith returns the command lines that have a text.
func processesWith(t *testing.T, text string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	var found []string
	for _, file := range files {
		line, _ := os.ReadFile(file) // the process may have ended
		if strings.Contains(string(line), text) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// TestOldIPTables checks that rules are written with iptables 1.6.1: it has no --random-fully, and its iptables-restore neither
// waits for the xtables lock nor takes it.
func TestOldIPTables(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[2])
	called := filepath.Join(n.dir, "called")
	scripts := map[string]string{}
	for _, f := range families() {
		// The real program takes another lock, and this script checks who has the lock of the host.
		scripts[f[0]] = fmt.Sprintf("echo \"$*\" >>%s\n[ \"$1\" != --version ] || exec echo '%s v1.6.1'\nexec %s \"$@\"\n", called, f[0], lookPath(t, f[0]+"-legacy"))
		scripts[f[0]+"-restore"] = fmt.Sprintf(`[ "$1" != --version ] || exit 0 # which it does not know
case "$*" in *-w*) echo "Can't open 5" >&2; exit 1; esac
%s --nonblock /run/xtables.lock true && { echo "nobody has the xtables lock" >&2; exit 1; }
input=$(cat)
case "$input" in *--random-fully*) echo 'unknown option "--random-fully"' >&2; exit 2; esac
echo "$input" | XTABLES_LOCKFILE=/run/other.lock exec %s "$@"
`, lookPath(t, "flock"), lookPath(t, f[0]+"-legacy-restore"))
	}
	n.path = n.scripts(t, scripts)
	conf := n.conf(t, "podnet", object{"backend": "auto", "enableIPv6": true})
	const warning = "chain IP-MASQ-AGENT has no random source ports"
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, warning)
	if rules := n.rules(t); strings.Contains(rules, "random-fully") || !strings.Contains(rules, "-A IP-MASQ-AGENT") {
		t.Errorf("rules:\n%s", rules)
	}
	n.wantOwnedChains(t, "IP-MASQ-AGENT ipv4 iptables legacy", "IP-MASQ-AGENT ipv6 iptables legacy")
	must(t, os.Remove(called))
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	if calls := tracedCalls(t, called); len(calls) > 0 {
		t.Errorf("with correct rules: %q", calls)
	}
	// A change, and a repair without a record.
	conf = n.conf(t, "podnet", object{"backend": "auto", "enableIPv6": true, "nonMasqueradeCIDRs": []string{"198.51.100.0/24"}})
	n.addAndCheck(t, conf)
	must(t, os.Remove(filepath.Join(n.dataDir, "record.json")))
	n.addAndCheck(t, conf)
	if rules := n.rules(t); strings.Contains(rules, "random-fully") || !strings.Contains(rules, "198.51.100.0/24") {
		t.Errorf("rules:\n%s", rules)
	}
	n.conflist(t, "podnet", object{"nonMasqueradeCIDRs": []string{"198.51.100.0/24"}, "enableIPv6": true})
	stdout, stderr, _ := n.reconciler(t, "--backend=auto", "status")
	if !strings.Contains(stdout, "ports-not-random") {
		t.Errorf("status has no notice:\n%s%s", stdout, stderr)
	}
}
