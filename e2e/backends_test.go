// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// backend is one of the backends and iptables variants in which a node keeps rules.
type backend struct {
	name    string
	setting string // value of the key backend
	variant string // variant of iptables and suffix of its programs; "" for nftables
}

func backends() []backend {
	return []backend{
		{"nftables", "nftables", ""},
		{"iptables-nft", "iptables", "nft"},
		{"iptables-legacy", "iptables", "legacy"},
	}
}

// onEveryBackend runs a test on one node per backend, beside other tests.
func onEveryBackend(t *testing.T, test func(t *testing.T, n *node)) {
	t.Helper()
	t.Parallel()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) { test(t, newNode(t, f)) })
	}
}

// programs fills a directory with links to the programs of the backend, so that the plain names are
// of its variant on any machine. It returns the directory as a PATH. For nftables the directory is
// empty.
func (f backend) programs(t *testing.T, dir string) string {
	t.Helper()
	must(t, os.Mkdir(dir, 0o755))
	if f.variant == "" {
		return dir
	}
	for _, base := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			program, err := exec.LookPath(base + "-" + f.variant + suffix)
			if err != nil {
				t.Fatalf("%v (`make packages` installs it)", err)
			}
			must(t, os.Symlink(program, filepath.Join(dir, base+suffix)))
		}
	}
	return dir
}
