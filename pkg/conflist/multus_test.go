// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// multusOf is the configuration that Multus generates of a delegate's.
func multusOf(delegate string) string {
	return `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/k","delegates":[` + delegate + `]}`
}

// shim is that of Multus, thick.
func shim(clusterNetwork string) string {
	return fmt.Sprintf(`{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus-shim","clusterNetwork":%q}`, clusterNetwork)
}

func TestFindThroughMultus(t *testing.T) {
	a, withEntry := listWith("a"), listWith("a", ours)
	const made = "10-one-made-by-ip-masq.conflist"
	list := func(plugins string) string {
		return `{"cniVersion":"1.0.0","name":"multus-cni-network","plugins":[` + plugins + `]}`
	}
	for _, c := range []struct {
		name, network string
		files         map[string]string
		file          string // of the network; "" : none is found
		via           string // the file of Multus, and what is wrong with it
		says          string
	}{
		{name: "thin", files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conf lacks"},
		{name: "thin, a list", files: map[string]string{"00-multus.conflist": list(multusOf(a)), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conflist lacks"},
		{name: "thin, with a copy of the entry", files: map[string]string{"00-multus.conf": multusOf(withEntry), "10-a.conflist": withEntry}, file: "10-a.conflist", via: "00-multus.conf"},
		{name: "its name overridden", network: "a", file: "10-a.conflist", via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": strings.Replace(multusOf(a), "multus-cni-network", "a", 1), "10-a.conflist": a}},
		{name: "Multus's own network is named", network: "multus-cni-network", file: "10-a.conflist", via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a}},
		{name: "another network is named", network: "b", file: "20-b.conflist",
			files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a, "20-b.conflist": listWith("b")}},
		{name: "Multus is not the first", file: "00-a.conflist", files: map[string]string{"00-a.conflist": a, "70-multus.conf": multusOf(a)}},
		{name: "thick", files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-a.conflist"), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conf"},
		{name: "thick, with a single configuration", file: "10-one.conf", via: "00-multus.conf",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-one.conf"), "10-one.conf": single}},
		{name: "thick, until it restarts", file: made, via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-one.conf"), "10-one.conf": single, made: madeOf(t, single, ours)}},
		{name: "thick, restarted", file: made, via: "00-multus.conf",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/" + made), "10-one.conf": single, made: madeOf(t, single, ours)}},
		{name: "nested", file: "10-a.conflist", via: "00-multus.conf nested 3",
			files: map[string]string{"00-multus.conf": multusOf(list(multusOf(multusOf(a)) + "," + ours)), "10-a.conflist": a}},
		{name: "the second delegate is no master", says: "no other file of this directory has network b",
			files: map[string]string{"00-multus.conf": multusOf(listWith("b") + "," + a), "10-a.conflist": a}},
		{name: "the entry beside Multus", file: "00-multus.conflist", files: map[string]string{"00-multus.conflist": list(multusOf(a) + "," + ours), "10-a.conflist": a}},
		{name: "the entry in a delegate that is nowhere else", file: "70-multus.conf", files: map[string]string{"70-multus.conf": multusOf(withEntry)}},
		{name: "a delegate that is nowhere else", says: "has network a", files: map[string]string{"70-multus.conf": multusOf(a)}},
		{name: "or in a broken file", says: "mend or remove it", files: map[string]string{"70-multus.conf": multusOf(a), "80.conflist": "{"}},
		{name: "itself", says: "has network multus-cni-network", files: map[string]string{"00-multus.conf": shim("/etc/cni/net.d/00-multus.conf")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := dirWith(t, c.files)
			n, err := Find(dir, c.network)
			if c.file == "" {
				if !errors.Is(err, ErrDelegate) || errors.Is(err, ErrNotThere) || !strings.Contains(strings.ReplaceAll(err.Error(), `"`, ""), c.says) || !strings.Contains(err.Error(), "--conflist-network") {
					t.Fatal(n.Path, err)
				}
				before := filesOf(t, dir)
				if change, err := (Place{Dir: dir, Network: c.network, Entry: []byte(ours)}).Ensure(t.Context()); !errors.Is(err, ErrDelegate) || change.Wrote {
					t.Error(change, err)
				}
				if diff := cmp.Diff(before, filesOf(t, dir)); diff != "" {
					t.Error(diff)
				}
				return
			}
			if err != nil || n.Path != filepath.Join(dir, c.file) {
				t.Fatal(n.Path, err)
			}
			via := ""
			if m := n.Multus; m != nil {
				via = filepath.Base(m.Path)
				if err := m.Err("a"); err != nil && m.Depth > 1 {
					via += fmt.Sprintf(" nested %d", m.Depth)
				} else if err != nil {
					via += " lacks"
				}
			}
			if via != c.via {
				t.Errorf("through %q, want %q", via, c.via)
			}
		})
	}
}

// TestDeeplyNestedMultus: what is hostile costs little.
func TestDeeplyNestedMultus(t *testing.T) {
	const open = `{"type":"multus","name":"m","delegates":[`
	for depth, says := range map[int]string{1000: "", 4900: "", 20000: "exceeded max depth"} {
		doc := strings.Repeat(open, depth) + listWith("a") + strings.Repeat("]}", depth)
		dir := dirWith(t, map[string]string{"00-multus.conf": doc, "10-a.conflist": listWith("a")})
		start := time.Now()
		n, err := Find(dir, "")
		switch {
		case says == "" && (err != nil || n.Multus.Depth != depth):
			t.Error(depth, err)
		case says != "" && (err == nil || !strings.Contains(err.Error(), says)):
			t.Error(depth, err)
		}
		if took := time.Since(start); took > 5*time.Second {
			t.Errorf("%d levels took %v", depth, took)
		}
	}
}
