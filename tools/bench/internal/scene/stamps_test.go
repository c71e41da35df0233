// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"os"
	"path/filepath"
	"testing"
)

// TestStamps checks that Stamps detects writes that leave contents and size unchanged.
func TestStamps(t *testing.T) {
	write := func(t *testing.T, path string) {
		t.Helper()
		if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		change func(t *testing.T, n *Node)
		want   int
	}{
		"nothing":          {func(*testing.T, *Node) {}, 0},
		"written in place": {func(t *testing.T, n *Node) { write(t, filepath.Join(n.DataDir, "record.json")) }, 1},
		"a new file":       {func(t *testing.T, n *Node) { write(t, filepath.Join(n.DataDir, "new")) }, 2},
		"agents' file":     {func(t *testing.T, n *Node) { write(t, filepath.Join(n.AgentDir(), "ip-masq-agent")) }, 1},
		"a cache in place": {func(t *testing.T, n *Node) { write(t, filepath.Join(n.DataDir, "x.verified")) }, 0},
		"an attachment":    {func(t *testing.T, n *Node) { write(t, filepath.Join(n.DataDir, "attachments", "x")) }, 0},
		"created and removed": {func(t *testing.T, n *Node) {
			p := filepath.Join(n.DataDir, "tmp")
			write(t, p)
			if err := os.Remove(p); err != nil {
				t.Fatal(err)
			}
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			n := &Node{Dir: filepath.Join(t.TempDir(), "node")}
			n.DataDir = filepath.Join(n.Dir, "data")
			for _, d := range []string{filepath.Join(n.DataDir, "attachments"), n.AgentDir()} {
				if err := os.MkdirAll(d, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			for _, path := range []string{n.DataDir + "/record.json", n.DataDir + "/x.verified", n.AgentDir() + "/ip-masq-agent"} {
				write(t, path)
			}
			before, err := n.Stamps()
			if err != nil {
				t.Fatal(err)
			}
			c.change(t, n)
			after, err := n.Stamps()
			if err != nil {
				t.Fatal(err)
			}
			if got := before.Changed(after); got != c.want {
				t.Errorf("%d changed, want %d", got, c.want)
			}
		})
	}
}
