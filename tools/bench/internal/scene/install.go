// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"fmt"
	"io/fs"
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
	for _, dir := range []string{"", "bench", "cni"} {
		if err := copyPrograms(filepath.Join(built, dir), filepath.Join(installed, dir)); err != nil {
			return nil, errors.Join(fmt.Errorf("install programs: %w (`make bench` builds them)", err), remove())
		}
	}
	return remove, os.Setenv("IPMASQ_BIN_DIR", installed)
}

// copyPrograms copies the regular files of a directory, and nothing below it.
func copyPrograms(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			continue
		}
		program, err := fs.ReadFile(os.DirFS(from), e.Name())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, e.Name()), program, 0o755); err != nil {
			return err
		}
	}
	return nil
}
