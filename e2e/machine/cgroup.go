// SPDX-License-Identifier: Apache-2.0

package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

const (
	cgroupRoot   = "/sys/fs/cgroup"
	cgroupPrefix = "ip-masq-e2e-"
)

// hierarchies returns the mount points of cgroup hierarchies: one with version 2, one for each
// controller with version 1.
func hierarchies(t topology.T) []string {
	if _, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers")); err == nil {
		return []string{cgroupRoot}
	}
	mounts := assert.Must(os.ReadFile("/proc/self/mounts"))(t)
	var found []string
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) > 2 && strings.HasPrefix(fields[2], "cgroup") && strings.HasPrefix(fields[1], cgroupRoot+"/") {
			found = append(found, fields[1])
		}
	}
	if len(found) == 0 {
		t.Fatalf("no cgroups are mounted below %s", cgroupRoot)
	}
	return found
}

// makeCgroups creates the machine's cgroup in every hierarchy. Its name has this process's PID and
// PID namespace, so that cgroups of a killed process can be recognized.
func (m *Machine) makeCgroups(t topology.T) {
	var namespace unix.Stat_t
	assert.NoError(t, unix.Stat("/proc/self/ns/pid", &namespace))
	prefix := fmt.Sprintf("%s%d-", cgroupPrefix, namespace.Ino)
	m.Cgroup = fmt.Sprintf("/%s%d-%s", prefix, os.Getpid(), filepath.Base(m.Host.Path))
	for _, root := range hierarchies(t) {
		removeLeft(t, root, prefix)
		path := filepath.Join(root, m.Cgroup)
		assert.NoError(t, os.Mkdir(path, 0o755))
		m.cgroups = append(m.cgroups, path)
		// With version 1 a cpuset accepts no process before these are set.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(root, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			assert.NoError(t, err)
			assert.NoError(t, os.WriteFile(filepath.Join(path, file), value, 0))
		}
	}
}

func (m *Machine) removeCgroups() error {
	var errs []error
	for _, path := range m.cgroups {
		errs = append(errs, removeTree(path))
	}
	return errors.Join(errs...)
}

// removeLeft removes the cgroups of ended processes from a hierarchy.
func removeLeft(t topology.T, root, prefix string) {
	for _, path := range assert.Must(filepath.Glob(filepath.Join(root, prefix+"*")))(t) {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
		if _, err := os.Stat("/proc/" + pid); err != nil {
			assert.NoError(t, removeTree(path))
		}
	}
}

// removeTree removes a cgroup and those below it, the lowest first. The kernel reports EBUSY for a
// moment after the last process has ended.
func removeTree(top string) error {
	var paths []string
	err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			paths = append(paths, path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list cgroups: %w", err)
	}
	for _, path := range slices.Backward(paths) {
		err := unix.Rmdir(path)
		for tries := 0; errors.Is(err, unix.EBUSY) && tries < 200; tries++ {
			time.Sleep(10 * time.Millisecond)
			err = unix.Rmdir(path)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		}
	}
	return nil
}
