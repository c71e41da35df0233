// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Install copies all built programs to a tmpfs, the sandbox's /opt/cni, and runs the copies. On a
// disk's file system the page sizes in the page cache depend on the time of writing, and one copy
// of a program can take 40 % more processor time to start than another.
func Install() (remove func() error, err error) {
	built, err := topology.BinDir()
	if err != nil {
		return nil, err
	}
	installed, err := os.MkdirTemp("/opt/cni", "installed-")
	if err != nil {
		return nil, err
	}
	remove = func() error { return errors.Join(os.RemoveAll(installed), os.Setenv("IPMASQ_BIN_DIR", built)) }
	err = os.CopyFS(filepath.Join(installed, "bench"), os.DirFS(filepath.Join(built, "bench")))
	for _, name := range []string{"ip-masq", "ip-masq-reconciler"} {
		program, readErr := os.ReadFile(filepath.Join(built, name))
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(installed, name), program, 0o755))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("install programs: %w (`make bench` builds them)", err), remove())
	}
	return remove, os.Setenv("IPMASQ_BIN_DIR", installed)
}
