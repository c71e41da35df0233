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
)

const (
	cgroupRoot   = "/sys/fs/cgroup"
	cgroupPrefix = "ip-masq-e2e-"
)

// hierarchies returns the mount points of cgroup hierarchies: one with version 2, one for each
// controller with version 1.
func hierarchies() ([]string, error) {
	if _, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers")); err == nil {
		return []string{cgroupRoot}, nil
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) > 2 && strings.HasPrefix(fields[2], "cgroup") && strings.HasPrefix(fields[1], cgroupRoot+"/") {
			found = append(found, fields[1])
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no cgroups are mounted below %s", cgroupRoot)
	}
	return found, nil
}

// makeCgroups creates the machine's cgroup in every hierarchy. Its name has this process's PID and
// PID namespace, so that cgroups of a killed process can be recognized.
func (m *Machine) makeCgroups() error {
	var namespace unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &namespace); err != nil {
		return fmt.Errorf("identify PID namespace: %w", err)
	}
	prefix := fmt.Sprintf("%s%d-", cgroupPrefix, namespace.Ino)
	m.Cgroup = fmt.Sprintf("/%s%d-%s", prefix, os.Getpid(), filepath.Base(m.Host.Path))
	roots, err := hierarchies()
	if err != nil {
		return fmt.Errorf("find cgroups: %w", err)
	}
	for _, root := range roots {
		if err := removeLeft(root, prefix); err != nil {
			return err
		}
		path := filepath.Join(root, m.Cgroup)
		if err := os.Mkdir(path, 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
		m.cgroups = append(m.cgroups, path)
		// With version 1 a cpuset accepts no process before these are set.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(root, file))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(path, file), value, 0)
			}
			if err != nil {
				return fmt.Errorf("fill cpuset: %w", err)
			}
		}
	}
	return nil
}

func (m *Machine) removeCgroups() error {
	var errs []error
	for _, path := range m.cgroups {
		errs = append(errs, removeTree(path))
	}
	return errors.Join(errs...)
}

// removeLeft removes the cgroups of ended processes from a hierarchy.
func removeLeft(root, prefix string) error {
	left, err := filepath.Glob(filepath.Join(root, prefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range left {
		pid, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
		if _, err := os.Stat("/proc/" + pid); err == nil {
			continue
		}
		if err := removeTree(path); err != nil {
			return err
		}
	}
	return nil
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
