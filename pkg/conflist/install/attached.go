// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Attachment is a container's interface that a runtime made with our plugin, and
// may remove by the conflist as it was then.
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Network     string `json:"network"`
	File        string `json:"file"` // which the runtime removes with the attachment
}

// isMultus reports whether it is Multus that keeps the configuration.
func (a Attachment) isMultus() bool { return strings.HasSuffix(filepath.Dir(a.File), multusCache) }

const multusCache = "/var/lib/cni/multus"

// caches are the directories in which configurations are kept for the removal:
// libcni's (CRI-O, podman) and Multus's.
func caches() []string { return []string{"/var/lib/cni/results", multusCache} }

// containerdStates are where containerd has the containers that run, below its
// state directory: those of containerd itself, k3s and microk8s.
func containerdStates() []string {
	return []string{"/run/containerd", "/run/k3s/containerd", "/var/snap/microk8s/common/run/containerd"}
}

// Attached returns the attachments, below a root directory, by whose removal a
// runtime will run our plugin although no conflist names it any more.
//
// Those of containers that containerd runs are not among them: it fills libcni's
// cache too, but goes by the conflist as it is when the container ends. Multus goes by
// its own cache, whatever runs the container. Nor are
// those from before the boot whose network namespace is gone: on some
// distributions the cache outlives containers that were never ended.
func Attached(root string) ([]Attachment, error) {
	booted, err := bootTime()
	if err != nil {
		return nil, err
	}
	var found []Attachment
	var errs []error
	for _, dir := range caches() {
		dir = filepath.Join(root, dir)
		entries, err := os.ReadDir(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, safefile.Error("read the directory", dir, err))
		}
		for _, e := range entries {
			if !e.Type().IsRegular() {
				continue
			}
			a, err := attachment(root, filepath.Join(dir, e.Name()), booted)
			errs = append(errs, err)
			if a != nil {
				found = append(found, *a)
			}
		}
	}
	return found, errors.Join(errs...)
}

// attachment reads one file of a cache; nil where it is none that counts.
func attachment(root, path string, booted time.Time) (*Attachment, error) {
	value, info, err := readJSON(path)
	switch {
	case errors.Is(err, errNotJSON):
		const writing = 10 * time.Second
		if info != nil && time.Since(info.ModTime()).Abs() < writing {
			return nil, fmt.Errorf("%s is being written", policy.Printable(path))
		}
		return nil, nil // torn: its runtime can read it no more than we can
	case errors.Is(err, fs.ErrNotExist): // removed since it was listed
		return nil, nil
	case err != nil:
		return nil, err
	case !names(value, 0):
		return nil, nil
	}
	a := Attachment{File: path, ContainerID: filepath.Base(path)}
	netns := ""
	if members, ok := value.(map[string]any); ok {
		for key, to := range map[string]*string{"containerId": &a.ContainerID, "ifName": &a.IfName, "networkName": &a.Network, "netns": &netns} {
			if s, ok := members[key].(string); ok && s != "" {
				*to = s
			}
		}
	}
	if info.ModTime().Before(booted) && (netns == "" || !exists(root, netns)) || !a.isMultus() && isContainerds(root, a.ContainerID) {
		return nil, nil
	}
	return &a, nil
}

// isContainerds reports whether containerd runs the container.
func isContainerds(root, id string) bool {
	if id == "" || id != filepath.Base(id) || strings.HasPrefix(id, ".") {
		return false
	}
	for _, state := range containerdStates() {
		tasks := filepath.Join(root, state, "io.containerd.runtime.v2.task")
		namespaces, err := os.ReadDir(tasks)
		if err != nil {
			continue // another runtime's node, or not mounted here: then it counts
		}
		for _, ns := range namespaces {
			if exists(tasks, filepath.Join(ns.Name(), id)) {
				return true
			}
		}
	}
	return false
}

// bootTime returns when the node was booted, by its clock as it is set now.
func bootTime() (time.Time, error) {
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return time.Time{}, fmt.Errorf("read the time since the boot: %w", err)
	}
	return time.Now().Add(-time.Duration(up.Nano())), nil
}
