// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// byHand runs a command of the reconciler as an operator does, without the flags of the node.
func (n *node) byHand(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	c := n.Node.Command(n.timeout(t), reconcilerProgram(t), args...)
	c.Env = []string{"PATH=" + n.path}
	return run(t, c)
}

// sameAnswers checks that each command answers alike without flags and with these, and says where its
// settings come from. Only the ages of policies, which rise from one command to the next, may differ.
// It returns what the commands print.
func (d *daemon) sameAnswers(t *testing.T, flags []string) string {
	t.Helper()
	var all strings.Builder
	age := regexp.MustCompile(`(?m)(, in force since [-\d]+ [:\d]+ UTC) \((\d+[dhms]){1,2}\)$`)
	for _, command := range [][]string{
		{"check"}, {"check", "-o", "json"},
		{"explain", "20.1.2.3"}, {"explain", "8.8.8.8"}, {"explain", "8.8.8.8", "-o", "json"}, {"explain", "2001:db8::1", "-o", "json"},
		{"doctor"}, {"doctor", "-o", "json"},
		{"render"}, {"render", "--family", "ipv6"},
	} {
		stdout, stderr, code := d.n.byHand(t, command...)
		allStdout, allStderr, allCode := d.n.byHand(t, slices.Concat(command, flags)...)
		if command[0] == "render" { // its flag --backend is about the form of the output
			allStdout, allStderr, allCode = d.n.byHand(t, slices.Concat(command, slices.DeleteFunc(slices.Clone(flags), func(f string) bool {
				return strings.HasPrefix(f, "--backend=")
			}))...)
		}
		allStdout, stdout = age.ReplaceAllString(allStdout, "$1 (AGE)"), age.ReplaceAllString(stdout, "$1 (AGE)")
		if diff := cmp.Diff(allStdout, stdout); diff != "" || code != allCode {
			t.Errorf("%v: exit code %d without flags, %d with all; stdout (-all +none):\n%s", command, code, allCode, diff)
		}
		wantSame(t, fmt.Sprintf("%v: stderr without flags, as with all", command), warningsIn(stderr), warningsIn(allStderr))
		if strings.Contains(stderr, "settings: from the") {
			t.Errorf("%v: says where the settings come from, although the reconciler answers:\n%s", command, stderr)
		}
		all.WriteString(stdout + stderr)
	}
	return all.String()
}

// finding is one of the findings of status, doctor and check as JSON.
type finding struct {
	ID, Severity, Cause, Remedy string
	Details                     []string
}

// sameFindings returns how the findings of status, doctor and check differ, "" if each is the same object in all
// three and once in each.
func (n *node) sameFindings(t *testing.T) string {
	t.Helper()
	found := map[string][]finding{}
	for _, command := range []string{"status", "doctor", "check"} {
		stdout, stderr, _ := n.byHand(t, command, "-o", "json")
		var answer struct{ Findings []finding }
		decoder := json.NewDecoder(strings.NewReader(stdout))
		if err := decoder.Decode(&answer); err != nil {
			return fmt.Sprintf("%s: %v\n%s%s", command, err, stdout, stderr)
		}
		ids := map[string]bool{}
		for _, f := range answer.Findings {
			if ids[f.ID] || f.Cause == "" || f.Remedy == "" || len(f.Details) == 0 {
				return fmt.Sprintf("%s: is there twice, or lacks a part: %+v", command, f)
			}
			ids[f.ID] = true
		}
		found[command] = answer.Findings
	}
	faults := slices.DeleteFunc(slices.Clone(found["status"]), func(f finding) bool { return f.Severity != "fault" })
	return cmp.Diff(found["status"], found["doctor"]) + cmp.Diff(faults, found["check"], cmpopts.EquateEmpty())
}

// TestAnswersWithoutFlags starts the reconciler with the flags of a DaemonSet, on a node without a
// reconciler.toml, and compares the answers of commands without flags with those that have all of its
// flags: when all is right, with a bad agent file, with a bad conflist, and after the end of the reconciler.
func TestAnswersWithoutFlags(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", map[string]any{"masqChain": "PODS", "enableIPv6": true})
		files := filepath.Join(n.dir, "of-the-pod", "config")
		agentFile := func(text string) {
			t.Helper()
			must(t, errors.Join(os.MkdirAll(files, 0o755), os.WriteFile(filepath.Join(n.dir, "next"), []byte(text), 0o644),
				os.Rename(filepath.Join(n.dir, "next"), filepath.Join(files, "ip-masq-agent"))))
		}
		agentFile("nonMasqueradeCIDRs: [20.0.0.0/8, \"2001:db8::/32\"]\nguard: count\n")
		flags := []string{
			"--data-dir=" + n.dataDir, "--cni-conf-dir=" + n.cni.ConfDir, "--cni-bin-dir=" + n.cni.Path[0], "--backend=" + n.backend.setting,
			"--agent-config-dir=" + files, "--enable-ipv6", "--masq-chain=PODS", "--to-ports=2000-2999", "--random-fully=false",
			"--pod-cidrs=10.1.0.0/16", "--resync-interval=1h",
		}
		d := n.startReconciler(t, flags...).untilReady(t)
		right := d.sameAnswers(t, flags)
		wantText(t, "the answers", right, "right: PODS (ipv4", "20.1.2.3: exempt", filepath.Join(files, "ip-masq-agent"), " UTC (AGE)", "2000-2999")
		if stdout, _, code := n.byHand(t, "status"); code != 0 || !strings.HasPrefix(stdout, "Node:        ready") {
			t.Errorf("status: exit code %d\n%s", code, stdout)
		}

		agentFile("nonMasqueradeCIDRs: [20.0.0.1/8]\n")
		d.untilUnready(t, "source: ", "20.0.0.1/8")
		if bad := d.sameAnswers(t, flags); !strings.Contains(bad, "20.0.0.1/8") || strings.Contains(bad, "right: PODS") {
			t.Errorf("answers do not name the bad file:\n%s", bad)
		}
		if stdout, stderr, code := n.byHand(t, "check"); code != 1 {
			t.Errorf("check: exit code %d, want 1\n%s%s", code, stdout, stderr)
		}
		if stdout, _, code := n.byHand(t, "status"); code != 3 || !strings.Contains(stdout, "\n  source:    "+files) {
			t.Errorf("status: exit code %d, want 3\n%s", code, stdout)
		}

		agentFile("nonMasqueradeCIDRs: [20.0.0.0/8, \"2001:db8::/32\"]\nguard: count\n")
		d.untilReady(t)
		d.stop(t)
		stdout, stderr, code := n.byHand(t, "status")
		if code != 1 || !strings.Contains(stdout, "Reconciler:  not running; last seen") || !strings.Contains(stdout, "Data dir:    "+n.dataDir) {
			t.Errorf("status: exit code %d, want 1\n%s%s", code, stdout, stderr)
		}
		if _, stderr, _ := n.byHand(t, "check"); !strings.HasPrefix(stderr, "settings: no reconciler runs; from the defaults\n") {
			t.Errorf("check does not say that no reconciler runs:\n%s", stderr)
		}
	})
}

// otherUser returns the UID of a user that owns no file of the test. A user namespace that maps only root has none.
func otherUser(t *testing.T) int {
	t.Helper()
	const nobody = 65534
	if err := os.Chown(t.TempDir(), nobody, nobody); err != nil {
		t.Fatalf("%v (run as root, as this test needs a second user)", err)
	}
	return nobody
}

// TestStatusOfAddressInUse checks that status has an address that the reconciler cannot bind as a problem, and that the
// node is ready.
func TestStatusOfAddressInUse(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", nil)
	address := n.unusedAddress()
	must(t, n.Node.Do(func() error {
		l, err := net.Listen("tcp", address)
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return err
	}))
	n.startReconciler(t, "--metrics-listen", address).untilReady(t)
	soon(t, func() string {
		stdout, stderr, code := n.reconciler(t, "status")
		if missing := lacking(stdout, []string{"listen-failed", "metrics_listen: ", "address already in use"}); code != 0 || len(missing) > 0 || strings.Count(stdout, "ss -ltnp") != 1 {
			return fmt.Sprintf("exit code %d, lacks %q:\n%s%s", code, missing, stdout, stderr)
		}
		return ""
	})
}

// TestStatusOfOtherUser checks that status of a user who may not read the state tells that, and nothing about the node.
func TestStatusOfOtherUser(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	uid := uint32(otherUser(t))
	dir := assert.Must(os.MkdirTemp("", "other-user"))(t) //nolint:usetesting // other users cannot reach what TempDir returns
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	program := filepath.Join(dir, "ip-masq-reconciler")
	must(t, os.Chmod(dir, 0o755))
	run(t, n.Node.Command(n.timeout(t), "cp", reconcilerProgram(t), program)) // a program that this process wrote may be busy
	c := n.Node.Command(n.timeout(t), program, "status", "--data-dir", n.dataDir)
	c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	stdout, stderr, code := run(t, c)
	if code != 1 || stdout != "" || !strings.HasPrefix(stderr, "ip-masq-reconciler: only root can read the state of the node, in ") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
}
