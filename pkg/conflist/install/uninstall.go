// SPDX-License-Identifier: Apache-2.0

package install

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Uninstall describes what to remove from a node.
type Uninstall struct {
	SearchDirs
	Editor  conflist.Editor // with Backups, RecordPath and CopyRecord
	Root    string          // "/", below which runtimes and Multus keep their cached results
	NoWait  bool            // remove the plugin although the DEL of cached results may call it
	AddTime time.Duration   // how long an ADD already started may still run
	// RemoveState removes rules and state after the plugin, perhaps repeatedly; nil leaves them.
	RemoveState func(context.Context) error
}

// Uninstalled is what one Step removed.
type Uninstalled struct {
	Conflists []conflist.Change // that were written
	Stays     []string          // what is to be known of generated lists that stay
	Binaries  []string          // paths
	// Attached and References are why the plugin stays, or would stay without NoWait.
	Attached   []CachedResult
	References []string // paths
}

// inUse says what stays and why, with a line for each remedy. It names some of the cached results, and all
// references.
func inUse(attached []CachedResult, references []string) error {
	var reasons []error
	var files, containers []string
	for _, r := range references {
		files = append(files, policy.Printable(r))
	}
	for _, a := range attached {
		id, file := policy.Printable(a.ContainerID), policy.Printable(a.File)
		containers = append(containers, fmt.Sprintf("container %s in %s", id, file))
	}
	if len(files) > 0 {
		reasons = append(reasons, errors.New("the plugin stays, with rules and state: "+
			"no pod could start without it, as it is named in "+strings.Join(files, ", ")+
			"\n  If Multus generates the file, restart Multus on the node, and remove the file "+
			"if it is still there then."+
			"\n  Otherwise restart the program that generates the file, or remove the plugin entry. "+
			"--no-wait does not help."))
	}
	if len(containers) > 0 {
		reasons = append(reasons, errors.New("the plugin stays, with rules and state: "+
			"a runtime will call it to tear down "+
			strings.Join(policy.First(3, containers), ", ")+
			"\n  To end these containers, drain the node; then run uninstall again."+
			"\n  --no-wait removes all now. Use it with containerd, which does not need the plugin; "+
			"the DEL of each pod of Multus fails once."))
	}
	return errors.Join(reasons...)
}

// Step removes what can be removed now: the plugin entries; then, unless runtimes will still call it, the
// plugin; then rules and state. It may be called again, and has to be after an error.
func (u Uninstall) Step(ctx context.Context) (Uninstalled, error) {
	var done Uninstalled
	if err := u.removeEntries(&done); err != nil {
		return done, err
	}
	if len(done.Conflists) > 0 {
		// An ADD in progress uses the previous conflist; libcni caches it when the ADD returns.
		select {
		case <-ctx.Done():
			return done, ErrStopped
		case <-time.After(u.AddTime):
		}
	}
	if err := u.checkUse(&done); err != nil {
		return done, err
	}
	// Another program may have inserted an entry meanwhile.
	if err := u.removeEntries(&done); err != nil {
		return done, err
	}
	var errs []error
	for _, dir := range u.Bin {
		path, err := remove(ctx, dir)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin from %s: %w", policy.Printable(dir), err))
		}
		if path != "" {
			done.Binaries = append(done.Binaries, path)
		}
	}
	if u.RemoveState != nil {
		errs = append(errs, u.RemoveState(ctx))
	}
	return done, errors.Join(errs...)
}

// checkUse returns why the plugin has to stay. CRI-O and podman end a pod by the conflist that it started
// with: a DEL of a plugin that is gone would leave pods that cannot end.
func (u Uninstall) checkUse(done *Uninstalled) error {
	dirs := append(slices.Clone(u.Conf), filepath.Join(u.Root, multusDir))
	var err error
	done.References, err = references(dirs)
	if err != nil {
		return fmt.Errorf("the plugin stays, as a file that may name it cannot be read: %w", err)
	}
	done.Attached, err = cachedResults(u.Root)
	waits := !u.NoWait && u.hasPlugin()
	if !waits {
		return inUse(nil, done.References)
	}
	if err != nil {
		return fmt.Errorf("the plugin stays, as it is unknown whether runtimes will call it: %w; "+
			"or use --no-wait", err)
	}
	return inUse(done.Attached, done.References)
}

// hasPlugin reports whether a plugin is there that a runtime could call.
func (u Uninstall) hasPlugin() bool {
	for _, dir := range u.Bin {
		if exists(dir, config.PluginType) {
			return true
		}
	}
	return false
}

func (u Uninstall) removeEntries(done *Uninstalled) error {
	var errs []error
	e := u.Editor
	for _, dir := range u.Conf {
		e.Keep = append(e.Keep, conflist.MultusFiles(dir)...)
	}
	for _, dir := range u.Conf {
		e.Dir = dir
		changes, err := e.Remove()
		done.note(changes)
		if err != nil {
			errs = append(errs, fmt.Errorf("remove the plugin entry from the conflists in %s: %w; "+
				"the plugin, rules and state stay until then", policy.Printable(dir), err))
		}
	}
	return errors.Join(errs...)
}

func (done *Uninstalled) note(changes []conflist.Change) {
	for _, c := range changes {
		if c.Wrote {
			done.Conflists = append(done.Conflists, c)
		}
		if c.Stays != "" && !slices.Contains(done.Stays, c.Stays) {
			done.Stays = append(done.Stays, c.Stays)
		}
	}
}

const (
	// libcniCache (CRI-O, podman) and multusCache have the result and the configuration of each ADD, for DEL.
	libcniCache = "/var/lib/cni/results"
	multusCache = "/var/lib/cni/multus"
	// multusDir has the configurations of networks that pods ask Multus for by name.
	multusDir = "/etc/cni/multus/net.d"
)

// CachedResult is a file in a cache of libcni or Multus whose network configuration has the plugin
// entry: the DEL for this container and interface will call the plugin.
type CachedResult struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Network     string `json:"network"`
	File        string `json:"file"` // the runtime removes it after the DEL
}

// cachedResults returns the cached results below a root directory. Containers of containerd do not count: it
// fills libcni's cache, but calls DEL with the conflist as it is at that time. Multus uses its own cache,
// with any runtime. Results from before the boot do not count if their network namespace is gone: some caches
// survive a reboot.
func cachedResults(root string) ([]CachedResult, error) {
	var up unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) // supported since Linux 2.6.39
	booted := time.Now().Add(-time.Duration(up.Nano()))
	var found []CachedResult
	var errs []error
	for _, dir := range []string{libcniCache, multusCache} {
		dir = filepath.Join(root, dir)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, safefile.Error("read the directory", dir, err))
		}
		for _, e := range entries {
			if !e.Type().IsRegular() {
				continue
			}
			a, err := cachedResult(root, filepath.Join(dir, e.Name()), booted)
			errs = append(errs, err)
			if a != nil {
				found = append(found, *a)
			}
		}
	}
	return found, errors.Join(errs...)
}

func cachedResult(root, path string, booted time.Time) (*CachedResult, error) {
	value, info, err := readJSON(path)
	if !hasEntry(value, 0) {
		return nil, err
	}
	members, _ := value.(map[string]any)
	netns := textOf(members, "netns", "")
	a := CachedResult{
		File:        path,
		ContainerID: textOf(members, "containerId", filepath.Base(path)),
		IfName:      textOf(members, "ifName", ""),
		Network:     textOf(members, "networkName", ""),
	}
	isGone := info.ModTime().Before(booted) && (netns == "" || !exists(root, netns))
	isLibcni := filepath.Dir(path) != filepath.Join(root, multusCache)
	if isGone || isLibcni && isContainerd(root, a.ContainerID) {
		return nil, nil
	}
	return &a, nil
}

// textOf returns a member that is a text and not empty, else the other one.
func textOf(members map[string]any, key, other string) string {
	text, _ := members[key].(string)
	return cmp.Or(text, other)
}

// isContainerd reports whether containerd, that of k3s or that of microk8s runs a container.
func isContainerd(root, id string) bool {
	if id == "" || id != filepath.Base(id) || strings.HasPrefix(id, ".") {
		return false
	}
	states := []string{"/run/containerd", "/run/k3s/containerd", "/var/snap/microk8s/common/run/containerd"}
	for _, state := range states {
		tasks := filepath.Join(root, state, "io.containerd.runtime.v2.task")
		// There are none with another runtime, or if they are not mounted: then the container counts.
		namespaces, _ := os.ReadDir(tasks)
		for _, ns := range namespaces {
			if exists(tasks, filepath.Join(ns.Name(), id)) {
				return true
			}
		}
	}
	return false
}

// references returns the files below configuration directories that name the plugin at any depth and that
// a runtime or a plugin may read, by the end of their names. The entries of conflists are removed by then;
// what is left is such as Multus generates.
func references(dirs []string) ([]string, error) {
	const maxDepth = 4
	var found []string
	var errs []error
	for _, dir := range dirs {
		err := filepath.WalkDir(dir+"/", func(path string, e fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil
			case err != nil:
				return safefile.Error("read the directory", path, err)
			case e.IsDir() && strings.Count(strings.TrimPrefix(path, dir), "/") > maxDepth:
				return fs.SkipDir
			case e.IsDir(), !slices.Contains([]string{".conf", ".conflist", ".json"}, filepath.Ext(path)):
				return nil
			}
			value, _, err := readJSON(path)
			errs = append(errs, err)
			if hasEntry(value, 0) {
				found = append(found, path)
			}
			return nil
		})
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}

// readJSON reads and decodes a regular file. The value is nil if the file is torn, or was removed since it
// was listed. No runtime or plugin reads what Go's decoder refuses.
func readJSON(path string) (value any, info fs.FileInfo, err error) {
	text, info, err := safefile.ReadFile(path, 8<<20)
	switch {
	case errors.Is(err, safefile.ErrIrregular), errors.Is(err, fs.ErrNotExist):
		err = nil
	case err == nil && json.Unmarshal(text, &value) != nil:
		value = nil
	}
	return value, info, err
}

// hasEntry reports whether a JSON value, or one in base64 in it, has the plugin entry at any depth.
func hasEntry(value any, layers int) bool {
	const maxLayers = 4
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			if strings.EqualFold(key, "type") && member == config.PluginType || hasEntry(member, layers) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, func(item any) bool { return hasEntry(item, layers) })
	case string:
		text, err := base64.StdEncoding.DecodeString(v)
		if err != nil || len(text) == 0 || layers == maxLayers {
			return false
		}
		var inner any
		return json.Unmarshal(text, &inner) == nil && hasEntry(inner, layers+1)
	}
	return false
}
