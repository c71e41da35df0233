// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// form is one in which a node keeps rules.
type backend struct {
	name    string
	setting string // the value of the key
	variant string // of iptables, and of the names of its programs; else ""
}

func backends() []backend {
	return []backend{
		{"nftables", "nftables", ""},
		{"iptables-nft", "iptables", "nft"},
		{"iptables-legacy", "iptables", "legacy"},
	}
}

// onEveryForm runs a test on a node of each form.
func onEveryBackend(t *testing.T, test func(t *testing.T, n *node)) {
	t.Helper()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) { test(t, newNode(t, f)) })
	}
}

// programs fills a directory with links to the programs of the form, so that
// plain names are of its variant whatever the machine's are, and returns the PATH
// of that directory alone. With nftables it stays empty: that form needs none.
func (f backend) programs(t *testing.T, dir string) string {
	t.Helper()
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if f.variant == "" {
		return dir
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(base + "-" + f.variant + suffix)
			if err != nil {
				t.Fatalf("%v (`make packages` installs it)", err)
			}
			if err := os.Symlink(program, filepath.Join(dir, base+suffix)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}
