// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"encoding/json"
	"log/slog"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

const entryFile = "/etc/ip-masq/entry.json"

// managed is the network whose plugin entry the reconcilers manage, nil without one. The scenario states its policy in
// entry_file, and the main CNI plugin writes the conflist without an entry.
func (w *world) managed() *network {
	if w.scenario.manage {
		return w.networks[0]
	}
	return nil
}

// manage makes a reconciler manage the conflist.
func (w *world) manage(node *reconcile.Node, r *reconciler) {
	m := &conflist.Manager{
		Editor: conflist.Editor{
			Dir: confDir, Network: w.managed().name, Backups: node.Dir.Backups, RecordPath: node.Dir.ConflistRecordPath(),
			CopyRecord: node.Dir.CopyRecordPath(), Ask: w.node().CheckEntry, // Loop.CheckEntry waits for a mutex, which synctest does not know as waiting
		},
		ReadEntry: func() ([]byte, bool, error) {
			text, err := conflist.ReadEntry(entryFile)
			return text, true, err
		},
		BinDir: "/opt/cni/bin", Log: slog.New(slog.DiscardHandler),
	}
	r.loop.SyncConflist = m.Sync
}

// setEntry states another policy in entry_file. With nil the main CNI plugin's file goes.
func (w *world) setEntry(n *network, v *version) {
	if v == nil {
		w.machine.Remove(n.file())
	} else {
		n.stated = v
		w.machine.WriteFile(entryFile, marshal(entry{Type: "ip-masq", version: v}))
		if _, is := w.machine.ReadFile(n.file()); !is || n.bad {
			w.writeMain(n)
		}
	}
	n.bad = false
	w.note("%s states %s", entryFile, v)
	w.conflistChanged()
}

// writeMain writes the conflist as the main CNI plugin does.
func (w *world) writeMain(n *network) {
	n.written++
	n.others = n.mainText("bridge")
	w.machine.WriteFile(n.file(), n.others)
	if n.bad {
		n.bad, n.since = false, w.seq
	}
	w.note("the main CNI plugin writes its conflist")
	w.conflistChanged() // before the next process begins
}

// writeMesh rewrites the conflist as the installer of a service mesh does: it moves its plugin to the end of the list, and
// keeps the others. While the file cannot be parsed it waits.
func (w *world) writeMesh(n *network) {
	text, _ := w.machine.ReadFile(n.file())
	var list struct{ Plugins []json.RawMessage }
	if json.Unmarshal([]byte(text), &list) != nil || len(list.Plugins) == 0 {
		return
	}
	mesh := json.RawMessage(marshal(entry{Type: "mesh-cni"}))
	isMesh := func(p json.RawMessage) bool { return string(p) == string(mesh) }
	plugins := append(slices.DeleteFunc(list.Plugins, isMesh), mesh)
	isEntry := func(p json.RawMessage) bool { return strings.Contains(string(p), `"ip-masq"`) }
	n.others = n.listText(slices.DeleteFunc(slices.Clone(plugins), isEntry))
	w.machine.WriteFile(n.file(), n.listText(plugins))
	w.note("another program appends its plugin to the conflist")
	w.conflistChanged()
}

func (n *network) mainText(types ...string) string {
	plugins := []json.RawMessage{}
	for _, t := range types {
		plugins = append(plugins, json.RawMessage(marshal(entry{Type: t})))
	}
	return n.listText(plugins)
}

func (n *network) listText(plugins []json.RawMessage) string {
	return marshal(map[string]any{"cniVersion": "1.1.0", "name": n.name, "written": n.written, "plugins": plugins})
}

// administratorsFiles returns files of another network, under names that ip-masq uses or used.
func administratorsFiles() map[string]string {
	const list = `{"cniVersion": "1.0.0",  "name": "theirs", "plugins": [{"type": "ptp"}]}`
	return map[string]string{
		confDir + "/00-ip-masq.conflist":             list,
		confDir + "/05-ip-masq.conflist":             list,
		confDir + "/09-x-made-by-ip-masq.conflist":   list,
		confDir + "/10-net0.conflist.ip-masq.bak":    "backup of an administrator",
		confDir + "/10-net0.conflist.0123456789.bak": "backup of an administrator",
	}
}

func (w *world) writeAdministratorsFiles() {
	for path, text := range administratorsFiles() {
		w.machine.WriteFile(path, text)
	}
}

// judgeAdministratorsFiles objects to each file of an administrator that is not as it was.
func (w *world) judgeAdministratorsFiles() {
	for path, text := range administratorsFiles() {
		if now, is := w.machine.ReadFile(path); !is || now != text {
			w.object("%s, a file of an administrator, is there: %v: %s", path, is, now)
		}
	}
}

// conflistChanged takes note of the entry that the runtime finds for the managed network.
func (w *world) conflistChanged() {
	n, m := w.managed(), w.machine
	if n == nil || w.book.filesJudged == m.Writes {
		return
	}
	w.book.filesJudged = m.Writes
	text, _ := m.ReadFile(n.file())
	now := n.versionIn(text)
	if now != n.conf {
		w.confChanged(n, now)
	}
}

// versionIn returns the version whose entry is in a conflist, or nil.
func (n *network) versionIn(text string) *version {
	var list struct{ Plugins []json.RawMessage }
	if json.Unmarshal([]byte(text), &list) != nil {
		return nil
	}
	for _, v := range n.versions {
		text := marshal(entry{Type: "ip-masq", version: v})
		if slices.ContainsFunc(list.Plugins, func(p json.RawMessage) bool { return string(p) == text }) {
			return v
		}
	}
	return nil
}

// judgeConflist judges the files of the managed network when an active reconciler had the time to follow them: the entry is
// the one of entry_file, and all else is as the main CNI plugin wrote it.
func (w *world) judgeConflist() {
	n := w.managed()
	if n != nil {
		w.judgeAdministratorsFiles()
	}
	// After a fault an entry may not be on record as ip-masq's, and a file that cannot be parsed may be that of any network.
	if n == nil || w.bad() || w.book.fault > 0 {
		return
	}
	main, is := w.machine.ReadFile(n.file())
	stray := slices.DeleteFunc(w.machine.Names(confDir), func(name string) bool { return !strings.HasSuffix(name, ".tmp") })
	if is && len(stray) > 0 && w.counts["reboots"] == 0 { // the next write of a conflist removes what a boot left
		w.object("files are left beside the conflists: %v", stray)
	}
	if !is {
		return
	}
	if n.conf != n.stated {
		w.object("the conflist has %v, and entry_file states %v", n.conf, n.stated)
	}
	if rest := strings.Replace(main, ","+marshal(entry{Type: "ip-masq", version: n.stated}), "", 1); rest != n.others {
		w.object("all but the entry is not as other programs wrote it: %s\nwant %s", main, n.others)
	}
}
