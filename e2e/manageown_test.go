// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

const ownConflist = "05-ip-masq.conflist"

// TestManageOwn checks ip-masq's own conflist, with packets: pods start through it, also while no reconciler runs and after
// the main CNI plugin has written its file anew, whose bytes stay; it follows that file within a second; a copy that nobody
// keeps is named by ADD, STATUS, check, status and doctor; without own the entry moves into the main CNI plugin's file.
func TestManageOwn(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		main := func() string { return string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile))) }
		list := string(n.mainConflist(t, "podnet"))
		write := func(text string) { n.writeConflistFile(t, mainFile, []byte(text)) }
		remove := func(file string) { must(t, os.Remove(filepath.Join(n.cni.ConfDir, file))) }
		exempts := func(masqueraded bool, to string) {
			t.Helper()
			all := onlyPod(n.pod(t, "podnet"))
			all.verdicts(t, n, masqueraded, map[string]string{"pod": to})
		}
		args := n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}})
		args[0] = "--conflist-own"
		must(t, os.Remove(filepath.Join(n.pluginDir(), "ip-masq"))) // a symlink, which install refuses
		write(list)
		must(t, os.Chmod(filepath.Join(n.cni.ConfDir, mainFile), 0o640))
		stdout, stderr, code := n.reconciler(t, append([]string{"install", "--plugin", n.plugin(t)}, args...)...)
		info, err := os.Stat(filepath.Join(n.cni.ConfDir, ownConflist))
		if code != 0 || !strings.Contains(stdout, ownConflist) || err != nil || info.Mode() != 0o640 {
			t.Fatalf("install: exit code %d, %v\n%s%s", code, err, stdout, stderr)
		}
		exempts(false, "1.2.3.4")
		d := n.startReconciler(t, args...)
		d.untilManaged(t, ownConflist)

		within := func(what string, ok func() bool) {
			t.Helper()
			began := time.Now()
			d.until(t, what, ok)
			if took := time.Since(began); took > time.Second {
				t.Errorf("%s after %s", what, took)
			}
		}
		changed := strings.Replace(list, "\n", "\n  \"disableCheck\": true,\n", 1)
		write(changed)
		within("the copy follows", func() bool {
			return strings.Contains(string(readFile(t, filepath.Join(n.cni.ConfDir, ownConflist))), "disableCheck")
		})
		n.writeConflistFile(t, ownConflist, []byte(changed))
		within("the copy has the entry again", func() bool { return n.hasPluginEntry(t, ownConflist) })
		n.writeEntryFile(t, string(marshalIndent(t, n.entry(object{"nonMasqueradeCIDRs": []string{"1.2.4.0/24"}}))))
		d.until(t, "the new policy", func() bool { return strings.Contains(d.log(), "changed=nonMasqueradeCIDRs") })
		exempts(false, "1.2.4.1")
		exempts(true, "1.2.3.4")
		remove(mainFile)
		within("the copy is gone", func() bool { return !n.hasPluginEntry(t, ownConflist) })
		write(list)
		d.untilManaged(t, ownConflist)
		wantSame(t, "the main CNI plugin's file", main(), list)
		d.stop(t)

		n.flush(t) // a reboot
		write(list)
		exempts(false, "1.2.4.1")
		exempts(true, "1.2.3.4")
		status := func(want uint) result {
			conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"1.2.4.0/24"}, "prevResult": nil})
			return n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, want)
		}
		commands := func(want string) {
			t.Helper()
			for command, exit := range map[string]int{"check": 3, "status": 1, "doctor": 0} {
				stdout, stderr, code := n.reconciler(t, append([]string{command}, args[:len(args)-2]...)...)
				if said := stdout + stderr; code != exit && command == "check" || !strings.Contains(unwrapped(said), unwrapped(want)) || !strings.Contains(said, "conflist-stale") {
					t.Errorf("%s: exit code %d, want %q\n%s", command, code, want, said)
				}
			}
		}
		status(0)
		write(changed)
		pod := n.newPod(t)
		if _, stderr, code := n.add(t, "podnet", pod); code != 0 || !strings.Contains(stderr, mainFile+", which has changed since") {
			t.Errorf("ADD through a stale copy: exit code %d\n%s", code, stderr)
		}
		status(0)
		commands("which has changed since")
		remove(mainFile)
		if _, stderr, code := n.add(t, "podnet", n.newPod(t)); code != 0 || !strings.Contains(stderr, "which is gone") {
			t.Errorf("ADD through a copy whose main CNI plugin is gone: exit code %d\n%s", code, stderr)
		}
		wantText(t, "STATUS", status(50).stdout, "which is gone")
		commands("which is gone")

		write(list)
		args[0] = "--conflist-own=false"
		d = n.startReconciler(t, args...)
		d.until(t, "the entry in the main CNI plugin's file", func() bool { return n.hasPluginEntry(t, mainFile) && !n.hasPluginEntry(t, ownConflist) })
		exempts(false, "1.2.4.1")
		d.stop(t)
		write(list)
		args[0] = "--conflist-own"
		d = n.startReconciler(t, args...)
		d.untilManaged(t, ownConflist)
		d.stop(t)
		write(changed)
		_, stderr, code = n.reconciler(t, append([]string{"uninstall", "--no-wait"}, args[3:5]...)...)
		if left, err := config.ReadConfDir(n.cni.ConfDir); code != 0 || err != nil || main() != changed ||
			slices.ContainsFunc(left.Conflists, func(l config.Conflist) bool { return filepath.Base(l.File) == ownConflist }) {
			t.Errorf("uninstall: exit code %d, %v: %+v\n%s", code, err, left, stderr)
		}
	})
}

// TestManageOwnWithPluginFile: with a plugin.toml the policy is that of ip-masq's own conflist, the first file of the
// network, and a network whose conflists are gone has none.
func TestManageOwnWithPluginFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	args := n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}, "dataDir": nil})
	args[0] = "--conflist-own"
	writeTempFile(t, n.own(config.DefaultPluginFile), n.pluginFile(""))
	n.writeMainConflist(t, "podnet")
	d := n.startReconciler(t, args...)
	d.untilManaged(t, ownConflist)
	p := n.pod(t, "podnet")
	n.exempt(t, p, true, "1.2.3.4")
	other := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"0.0.0.0/0"}})
	n.invoke(t, invocation{verb: "ADD", conf: other}).want(t, 0, ownConflist, "which is in force")
	must(t, os.Remove(filepath.Join(n.cni.ConfDir, mainFile)))
	d.until(t, "the copy is gone", func() bool { return !n.hasPluginEntry(t, ownConflist) })
	n.invoke(t, invocation{verb: "ADD", conf: other}).want(t, 7, "has no policy")
	n.writeMainConflist(t, "podnet")
	d.untilManaged(t, ownConflist)
	n.pod(t, "podnet")
}

// TestOwnConflistThatNobodyKeeps: a reconciler that does not manage the conflist names a stale copy.
func TestOwnConflistThatNobodyKeeps(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	args := n.manageArgs(t, object{})
	must(t, os.Remove(filepath.Join(n.pluginDir(), "ip-masq")))
	n.writeMainConflist(t, "podnet")
	d := n.startReconciler(t, args[1:]...).untilReady(t)
	args[0] = "--conflist-own"
	n.wantSays(t, 0, nil, append([]string{"install", "--plugin", n.plugin(t)}, args...)...)
	d.untilReady(t)
	n.writeMainConflist(t, "other")
	d.untilUnready(t, "conflist-stale: ", ownConflist+" is a copy of", "which has changed since")
}
