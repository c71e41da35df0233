// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestManageFollowsEntryFile changes the entry file while the reconciler runs. It checks that conflist and packets
// follow within two seconds, that an entry with which no pod would start changes nothing and is a fault of the source,
// that an entry which somebody else wrote stays and is reported, and what install says and does about it.
func TestManageFollowsEntryFile(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		entry := func(exempt ...string) string {
			return string(marshalIndent(t, n.entry(object{"nonMasqueradeCIDRs": exempt})))
		}
		conflistHas := func(exempt string) bool {
			list := string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile)))
			return strings.Contains(list, exempt) && strings.Count(list, `"ip-masq"`) == 1
		}
		n.conflist(t, "other", object{"masqueradeCIDRs": []string{"1.2.5.0/24"}, "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		n.writeMainConflist(t, mainFile, "podnet")
		d := n.startReconciler(t, append(n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}}), "--conflist-network", "podnet")...)
		d.untilManaged(t, mainFile)
		p := n.pod(t, "podnet")
		all := onlyPod(p)
		n.exempt(t, p, true, "1.2.3.4")

		n.writeEntryFile(t, entry("1.2.4.0/24"))
		d.until(t, "the new entry in the conflist", func() bool { return conflistHas("1.2.4.0/24") })
		d.until(t, "the new policy", func() bool { return strings.Count(d.log(), "changed=nonMasqueradeCIDRs") == 2 })
		n.exempt(t, p, true, "1.2.4.1")
		n.exempt(t, p, false, "1.2.3.4")
		all.verdicts(t, n, true, map[string]string{"pod": "1.2.3.4"})
		if !strings.Contains(d.log(), `msg="replaced the plugin entry"`) || conflistHas("1.2.3.0/24") {
			t.Errorf("the former prefix is in the conflist, or the log does not say what happened:\n%s", d.log())
		}

		for _, bad := range [][]string{
			{entry("1.2.5.0/24"), "1.2.5.0/24", "other"},
			{entry("1.2.5.1/24"), "nonMasqueradeCIDRs[0]", "1.2.5.0/24"},
			{strings.Replace(entry("1.2.4.0/24"), "{", `{"prevResult": 3,`, 1), "prevResult"},
		} {
			n.writeEntryFile(t, bad[0])
			d.untilUnready(t, append([]string{"source: ", "conflist.entry_file"}, bad[1:]...)...)
			n.pod(t, "podnet")
			n.exempt(t, p, true, "1.2.4.1")
			if !conflistHas("1.2.4.0/24") {
				t.Error("a bad entry file changed the conflist")
			}
		}
		n.writeEntryFile(t, entry("1.2.4.0/24"))
		d.untilReady(t)

		byHand := strings.Replace(string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile))), "1.2.4.0/24", "1.2.6.0/24", 1)
		n.writeConflistFile(t, mainFile, []byte(byHand))
		d.until(t, "conflist_entry_differs 1", func() bool { return d.metric(t, "conflist_entry_differs") == 1 })
		d.untilReady(t)
		n.writeEntryFile(t, entry("1.2.7.0/24"))
		time.Sleep(300 * time.Millisecond)
		if !conflistHas("1.2.6.0/24") {
			t.Error("somebody else's entry was replaced")
		}
		n.exempt(t, p, true, "1.2.6.1")
		said, _, _ := n.reconciler(t, "status", "--cni-bin-dir", n.pluginDir())
		if !strings.Contains(said, "entry-differs") || !strings.Contains(said, "in nonMasqueradeCIDRs, and ip-masq did not write it") {
			t.Errorf("status: %s", said)
		}
		install := func(args ...string) string {
			stdout, stderr, code := n.reconciler(t, slices.Concat([]string{"install", "--plugin", n.plugin(t), "--cni-bin-dir", t.TempDir(),
				"--conflist-network", "podnet", "--conflist-entry-file", n.entryPath()}, args)...)
			if code != 0 {
				t.Errorf("install: exit code %d\n%s%s", code, stdout, stderr)
			}
			return stdout
		}
		if got := install(); !strings.Contains(got, "stays; it differs from the entry file in nonMasqueradeCIDRs: install --replace replaces it") {
			t.Error(got)
		}
		if got := install("--replace"); !strings.Contains(got, "changed: nonMasqueradeCIDRs") || !conflistHas("1.2.7.0/24") {
			t.Error(got)
		}
		d.until(t, "conflist_entry_differs 0", func() bool { return d.metric(t, "conflist_entry_differs") == 0 })
		d.untilReady(t)
		n.exempt(t, p, true, "1.2.7.1")
	})
}
