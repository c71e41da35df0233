// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/mainplugins"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// meshNode is a node whose conflist other programs write, too.
type meshNode struct {
	*node
	meshes []*mainplugins.Mesh
	args   []string
	daemon *daemon
}

// pluginsOf returns the plugins of the main CNI plugin's file by their types, how often each is there, and whether the
// file can be read.
func (n *meshNode) pluginsOf() (count map[string]int, first map[string]any, ok bool) {
	text, err := os.ReadFile(filepath.Join(n.cni.ConfDir, mainFile))
	var list struct{ Plugins []map[string]any }
	if err != nil || json.Unmarshal(text, &list) != nil || len(list.Plugins) == 0 {
		return nil, nil, false
	}
	count = map[string]int{}
	for _, p := range list.Plugins {
		kind, _ := p["type"].(string)
		count[kind]++
	}
	return count, list.Plugins[0], true
}

// settles fails the test unless, within two seconds of a step, each of the plugins is there once and no other, the main
// CNI plugin's is as that program wrote it, and nobody writes the file any more.
func (n *meshNode) settles(t *testing.T, step string, plugins ...string) {
	t.Helper()
	want := map[string]int{"bridge": 1}
	for _, p := range plugins {
		want[p] = 1
	}
	var main map[string]any
	bridge, _ := json.Marshal(n.bridge("podnet")) // a map of strings, lists and booleans
	_ = json.Unmarshal(bridge, &main)
	began := time.Now()
	right := func() bool {
		count, first, ok := n.pluginsOf()
		return ok && reflect.DeepEqual(count, want) && reflect.DeepEqual(first, main)
	}
	if !timelimit.Await(2*time.Second, right) {
		text, _ := os.ReadFile(filepath.Join(n.cni.ConfDir, mainFile))
		t.Fatalf("%s: after %s the file is\n%s\nwant %v", step, time.Since(began), text, want)
	}
	// All programs have seen the last write.
	time.Sleep(300 * time.Millisecond)
	before, err := os.Stat(filepath.Join(n.cni.ConfDir, mainFile))
	must(t, err)
	time.Sleep(time.Second)
	after, err := os.Stat(filepath.Join(n.cni.ConfDir, mainFile))
	must(t, err)
	if !os.SameFile(before, after) || !before.ModTime().Equal(after.ModTime()) || !right() {
		text, _ := os.ReadFile(filepath.Join(n.cni.ConfDir, mainFile))
		t.Errorf("%s: the file is written again and again:\n%s", step, text)
	}
}

func (n *meshNode) startMeshes() {
	for _, m := range n.meshes {
		m.Start()
	}
}

func (n *meshNode) types() []string {
	var types []string
	for _, m := range n.meshes {
		types = append(types, m.Type)
	}
	return types
}

// TestManageBesideMeshes runs the reconciler beside programs that append their plugins to the conflist as those of Istio
// and Linkerd do, in each order. Each plugin is there once, within two seconds of each step, and nobody fights.
func TestManageBesideMeshes(t *testing.T) {
	t.Parallel()
	meshes := map[string][]*mainplugins.Mesh{
		"Istio":   {{Type: "istio-cni"}},
		"Linkerd": {{Type: "linkerd-cni", EachFile: true}},
		"both":    {{Type: "istio-cni"}, {Type: "linkerd-cni", EachFile: true}},
	}
	for name, programs := range meshes {
		for _, order := range []string{"ip-masq first", "the other first"} {
			t.Run(name+", "+order, func(t *testing.T) {
				t.Parallel()
				n := &meshNode{node: newNode(t, backends()[0])}
				for _, p := range programs {
					n.meshes = append(n.meshes, &mainplugins.Mesh{Dir: n.cni.ConfDir, Type: p.Type, EachFile: p.EachFile})
				}
				n.args = n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}})
				n.writeMainConflist(t)
				run := func() { n.daemon = n.startReconciler(t, n.args...) }
				if order == "ip-masq first" {
					run()
					n.settles(t, "ip-masq", "ip-masq")
					n.startMeshes()
				} else {
					n.startMeshes()
					n.settles(t, "the other", n.types()...)
					run()
				}
				all := append(n.types(), "ip-masq")
				n.settles(t, "both", all...)

				for range 3 {
					n.writeMainConflist(t)
					n.settles(t, "the main CNI plugin writes its file", all...)
				}
				n.daemon.stop(t)
				n.settles(t, "ip-masq stops", all...)
				run()
				n.settles(t, "ip-masq runs again", all...)
				for _, m := range n.meshes {
					m.Kill()
					m.Start()
				}
				n.settles(t, "the other runs again", all...)
				for _, m := range n.meshes {
					must(t, m.Stop())
				}
				n.settles(t, "the other is removed", "ip-masq")
				n.startMeshes()
				n.settles(t, "the other is back", all...)
				if n.daemon.metric(t, "conflist_flapping") != 0 || strings.Contains(n.daemon.log(), "level=ERROR") {
					t.Errorf("the reconciler says\n%s", n.daemon.log())
				}
				n.daemon.untilReady(t)

				if order == "ip-masq first" {
					for _, m := range n.meshes {
						must(t, m.Stop())
					}
					n.settles(t, "the other is removed first", "ip-masq")
					n.uninstall(t)
				} else {
					n.uninstall(t)
					n.settles(t, "ip-masq is removed first", n.types()...)
					for _, m := range n.meshes {
						must(t, m.Stop())
					}
				}
				n.settles(t, "both are removed")
			})
		}
	}
}

func (n *meshNode) uninstall(t *testing.T) {
	t.Helper()
	n.daemon.stop(t)
	must(t, os.Remove(filepath.Join(n.pluginDir(), "ip-masq"))) // a symlink, which uninstall leaves alone
	n.wantSays(t, 0, nil, "uninstall", "--no-wait", "--cni-bin-dir", n.pluginDir())
}

// TestOthersFight: two programs that each want the last place write the file again and again. The entry is there each
// time that ip-masq looks, and the fight is flapping all the same: counted, with the plugins that are there.
func TestOthersFight(t *testing.T) {
	t.Parallel()
	n := &meshNode{node: newNode(t, backends()[0])}
	n.args = n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}})
	n.writeMainConflist(t)
	n.daemon = n.startReconciler(t, n.args...)
	n.daemon.untilManaged(t, mainFile)
	for _, plugin := range []string{"one-cni", "two-cni"} {
		n.meshes = append(n.meshes, &mainplugins.Mesh{Dir: n.cni.ConfDir, Type: plugin, Last: true})
	}
	n.startMeshes()
	t.Cleanup(func() {
		for _, m := range n.meshes {
			m.Kill()
		}
	})
	n.daemon.until(t, "conflist_flapping 1", func() bool { return n.daemon.metric(t, "conflist_flapping") == 1 })
	n.daemon.untilUnready(t, "conflist: ", mainFile, "write the file again and again", "one-cni", "two-cni")
	if n.daemon.metric(t, "conflist_present") != 1 {
		t.Error("the entry is gone")
	}
}
