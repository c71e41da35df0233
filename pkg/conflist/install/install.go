// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Dirs are the directories of a runtime's network configurations and plugins; "" is unknown.
type Dirs struct{ Conf, Bin string }

// ErrUnknownDirs reports that the directories do not follow from what the node has.
var ErrUnknownDirs = errors.New("name them with --cni-conf-dir and --cni-bin-dir")

const locating = "find the directories of the container runtime" // in errors

type candidate struct {
	distribution string
	Dirs
}

// candidates are the known pairs; of one distribution, the preferred one first. Sources: the defaults of
// containerd and CRI-O; GKE's and OpenShift's node configuration; the directories that k3s and microk8s write
// for their containerd.
func candidates() []candidate {
	const k3s, microk8s = "/var/lib/rancher/k3s", "/var/snap/microk8s/current"
	return []candidate{
		{"the usual", Dirs{config.DefaultCNIConfDir, "/opt/cni/bin"}},
		{"GKE", Dirs{config.DefaultCNIConfDir, "/home/kubernetes/bin"}},
		{"k3s", Dirs{k3s + "/agent/etc/cni/net.d", k3s + "/data/cni"}},
		{"k3s", Dirs{k3s + "/agent/etc/cni/net.d", k3s + "/data/current/bin"}},
		{"microk8s", Dirs{microk8s + "/args/cni-network", microk8s + "/opt/cni/bin"}},
		{"OpenShift", Dirs{"/run/multus/cni/net.d", "/var/lib/cni/bin"}}, // to which Multus delegates
		{"OpenShift", Dirs{"/etc/kubernetes/cni/net.d", "/var/lib/cni/bin"}},
	}
}

// matching returns the candidates with the stated directories. A stated directory that no candidate has takes
// the place of each one's.
func matching(stated Dirs) []candidate {
	all := candidates()
	if stated.Conf != "" {
		all = having(all, func(c candidate) bool { return c.Conf == stated.Conf })
		for i := range all {
			all[i].Conf = stated.Conf
		}
	}
	if stated.Bin != "" {
		all = having(all, func(c candidate) bool { return c.Bin == stated.Bin })
		for i := range all {
			all[i].Bin = stated.Bin
		}
	}
	return all
}

// having returns the candidates of a kind, or all if there is none.
func having(all []candidate, isKind func(candidate) bool) []candidate {
	var some []candidate
	for _, c := range all {
		if isKind(c) {
			some = append(some, c)
		}
	}
	if len(some) == 0 {
		return all
	}
	return some
}

// Locate finds the directories that are not stated, below a root directory: those whose network names plugins
// that are there; else, on a node without a main CNI plugin yet, those that exist. ErrUnknownDirs reports
// none, or several. A stated plugin directory must exist; one that is not stated counts only if CheckDir
// accepts it.
func Locate(root string, stated Dirs) (Dirs, error) {
	if stated.Conf != "" && stated.Bin != "" {
		return stated, nil
	}
	if stated.Bin != "" && !isDir(root, stated.Bin) {
		return Dirs{}, fmt.Errorf("%s: there is no directory %s; make it, or name the runtime's with "+
			"--cni-bin-dir", locating, policy.Printable(stated.Bin))
	}
	l := locator{root: root, checksBin: stated.Bin == ""}
	dirs, err := choose(matching(stated), l.runsNetwork, l.hasBoth, l.hasBin)
	if err != nil && l.refused != nil {
		err = fmt.Errorf("%w; %w", err, l.refused)
	}
	return dirs, err
}

// locator tests candidates below a root directory. A plugin directory that was not stated counts only if
// CheckDir accepts it.
type locator struct {
	root      string
	checksBin bool
	refused   error // the last refusal
}

func (l *locator) runsNetwork(c candidate) bool { return hasPlugins(l.root, c.Dirs) && l.isUsable(c) }

func (l *locator) hasBoth(c candidate) bool { return isDir(l.root, c.Conf) && l.hasBin(c) }

func (l *locator) hasBin(c candidate) bool { return isDir(l.root, c.Bin) && l.isUsable(c) }

func (l *locator) isUsable(c candidate) bool {
	if !l.checksBin {
		return true
	}
	err := CheckDir(l.root, c.Bin)
	l.refused = cmp.Or(err, l.refused)
	return err == nil
}

// CheckDir refuses a plugin directory, below a root directory, if a user other than root can replace a file
// in it, as in /home/kubernetes if that is a home: the programs in it run as root. A stated directory needs
// no check: the runtime runs the programs in it anyway.
func CheckDir(root, dir string) error {
	top, err := os.Stat(root)
	if err != nil {
		return safefile.Error("stat", root, err)
	}
	admin, _ := safefile.Owner(top) // in a user namespace, root can appear as another user
	for at := dir; at != "/" && err == nil; at = filepath.Dir(at) {
		info, statErr := os.Stat(filepath.Join(root, at))
		switch {
		case statErr == nil:
			err = checkOwner(at, info, admin)
		case !errors.Is(statErr, fs.ErrNotExist):
			err = safefile.Error("stat", at, statErr)
		}
	}
	return err
}

// checkOwner accepts a directory that group root can write, as archives of CNI plugins make /opt/cni/bin.
func checkOwner(path string, info fs.FileInfo, admin int) error {
	const remedy = "or set cni_bin_dir in " + config.DefaultReconcilerFile +
		" if the runtime runs its plugins from there"
	uid, gid := safefile.Owner(info)
	if uid != 0 && uid != admin && !safefile.IsOwn(info) {
		return fmt.Errorf("%s belongs to user %d, who could replace the plugin; chown it to root, %s",
			policy.Printable(path), uid, remedy)
	}
	if mode := info.Mode().Perm(); mode&0o002 != 0 || mode&0o020 != 0 && gid != 0 {
		return fmt.Errorf("%s can be written by others than its owner (mode %04o, group %d), "+
			"who could replace the plugin; chmod it to 0755, %s", policy.Printable(path), mode, gid, remedy)
	}
	return nil
}

// SearchDirs are all directories in which an uninstall looks.
type SearchDirs struct{ Conf, Bin []string }

// AllDirs returns the stated directories and, for one that is not stated, all that go with the other.
// It does not read the directories of the node, where an uninstall that is run again finds less.
func AllDirs(stated Dirs) SearchDirs {
	var s SearchDirs
	for _, c := range matching(stated) {
		if !slices.Contains(s.Conf, c.Conf) {
			s.Conf = append(s.Conf, c.Conf)
		}
		if !slices.Contains(s.Bin, c.Bin) {
			s.Bin = append(s.Bin, c.Bin)
		}
	}
	return s
}

// HaveAny reports whether there is a plugin entry, a plugin, or a temporary file of a killed Copy.
func (s SearchDirs) HaveAny() bool {
	return slices.ContainsFunc(s.Conf, hasEntryIn) || slices.ContainsFunc(s.Bin, hasPluginIn)
}

func hasEntryIn(dir string) bool {
	c, err := config.ReadConfDir(dir)
	if err != nil {
		return false
	}
	for _, list := range c.Conflists {
		if len(list.Entries) > 0 {
			return true
		}
	}
	return false
}

func hasPluginIn(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if e.Name() == config.PluginType || safefile.IsTemp(e.Name(), safefile.TempPrefix) {
			return true
		}
	}
	return false
}

// choose returns the candidate that passes the first test which any passes.
func choose(all []candidate, tests ...func(candidate) bool) (Dirs, error) {
	for _, passes := range tests {
		found := passing(all, passes)
		if len(found) == 1 {
			return found[0].Dirs, nil
		}
		if len(found) > 1 {
			var texts []string
			for _, c := range found {
				conf, bin := policy.Printable(c.Conf), policy.Printable(c.Bin)
				texts = append(texts, fmt.Sprintf("%s with %s (%s)", conf, bin, c.distribution))
			}
			return Dirs{}, fmt.Errorf("%s: there are several: %s; %w",
				locating, strings.Join(texts, ", "), ErrUnknownDirs)
		}
	}
	var names []string
	for _, c := range all {
		names = append(names, c.distribution)
	}
	return Dirs{}, fmt.Errorf("%s: none of the known ones (%s) exists; %w",
		locating, strings.Join(slices.Compact(names), ", "), ErrUnknownDirs)
}

// passing returns the candidates that pass a test, one of each distribution and of each pair of directories.
func passing(all []candidate, passes func(candidate) bool) []candidate {
	var found []candidate
	for _, c := range all {
		isKnown := func(f candidate) bool { return f.distribution == c.distribution || f.Dirs == c.Dirs }
		if !slices.ContainsFunc(found, isKnown) && passes(c) {
			found = append(found, c)
		}
	}
	return found
}

// hasPlugins reports whether the directory of plugins has all that the runtime's network names, besides
// ip-masq.
func hasPlugins(root string, d Dirs) bool {
	n, err := conflist.Find(filepath.Join(root, d.Conf), "")
	if err != nil {
		return false
	}
	others := 0
	for _, plugin := range n.Conflist.Types {
		if plugin == config.PluginType {
			continue
		}
		if !exists(root, filepath.Join(d.Bin, filepath.Base(plugin))) {
			return false
		}
		others++
	}
	return others > 0
}

func isDir(root, path string) bool {
	info, err := os.Stat(filepath.Join(root, path))
	return err == nil && info.IsDir()
}

// ErrStopped reports that the context ended before all was done.
var ErrStopped = errors.New("stopped before all was done; run it again")

// Binary is the plugin in the directory from which runtimes run it.
type Binary struct {
	Path    string `json:"path"`
	Version string `json:"version"` // as the plugin reports it
	Wrote   bool   `json:"wrote"`   // or it was there already
}

// Copy copies the plugin to a directory. It writes nothing if the same bytes are there with the right
// mode. The copy is run before it gets its name; after an error the previous plugin is still there.
func Copy(ctx context.Context, source, path string) (b Binary, err error) {
	defer func() {
		if err != nil {
			b, err = Binary{}, fmt.Errorf("install the plugin in %s: %w", policy.Printable(path), err)
		}
	}()
	data, _, err := safefile.ReadFile(source, maxBinary)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return b, fmt.Errorf("there is no plugin at %s; name it with --plugin", policy.Printable(source))
	case errors.Is(err, safefile.ErrIrregular):
		return b, fmt.Errorf("%s is not a regular file; name the plugin with --plugin",
			policy.Printable(source))
	case err != nil:
		return b, err
	}
	dir, err := lockDir(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return b, errors.New("there is no such directory; make it, or name the runtime's with --cni-bin-dir")
	}
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, dir.Close()) }()
	b.Path = dir.PathOf(config.PluginType)
	present, err := pluginIn(dir)
	if err != nil {
		return b, err
	}
	have, _, readErr := safefile.ReadFile(b.Path, maxBinary) // one that cannot be read is replaced
	isThere := present != nil && readErr == nil && bytes.Equal(have, data)
	if isThere && present.Mode() == binMode && safefile.IsOwn(present) {
		b.Version, err = version(ctx, b.Path, policy.Printable(b.Path), installTimeout)
		return b, err
	}
	temp, err := dir.Stage(data, func(file *os.File) error { return file.Chmod(binMode) })
	if err != nil {
		return b, err
	}
	defer func() { err = errors.Join(err, dir.Remove(temp)) }()
	name := "a copy of " + policy.Printable(source) + " there"
	b.Version, err = version(ctx, dir.PathOf(temp), name, installTimeout)
	if err == nil {
		err = dir.Rename(temp, config.PluginType)
	}
	if err != nil {
		return b, err
	}
	b.Wrote = true
	if err := dir.Sync(); err != nil {
		return b, fmt.Errorf("the new plugin is in place: %w", err)
	}
	return b, nil
}

// pluginIn returns the FileInfo of the plugin in a directory, nil if there is none. A file of its name that
// is not regular was not created by Copy, and stays, with an error.
func pluginIn(dir *safefile.Dir) (fs.FileInfo, error) {
	info, err := dir.Lstat(config.PluginType)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s stays: it is not a regular file, so ip-masq did not create it; "+
			"remove it if no other program needs it", policy.Printable(dir.PathOf(config.PluginType)))
	}
	return info, nil
}

// remove removes the plugin from a directory and returns its path, "" if there was none.
func remove(ctx context.Context, dir string) (path string, err error) {
	d, err := lockDir(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if info, err := pluginIn(d); info == nil || err != nil {
		return "", err
	}
	if err := d.Remove(config.PluginType); err != nil {
		return "", err
	}
	return d.PathOf(config.PluginType), d.Sync()
}

// binMode is the mode of the binary, whatever the umask.
const binMode = 0o755

const maxBinary = 256 << 20 // bytes

// lockDir locks a plugin directory: another process of ip-masq may copy a binary there and run it.
func lockDir(ctx context.Context, path string) (*safefile.Dir, error) {
	d, err := safefile.OpenLocked(ctx, path, lockWait)
	if err != nil && ctx.Err() != nil {
		return nil, ErrStopped
	}
	return d, err
}

// Version returns the version that an installed plugin reports.
func Version(ctx context.Context, path string) (string, error) {
	return version(ctx, path, policy.Printable(path), 2*time.Second)
}

const (
	installTimeout = 20 * time.Second
	lockWait       = 30 * time.Second // for another process of ip-masq
)

// version runs a program without a command, which then prints its version. The name is for messages.
func version(ctx context.Context, path, name string, timeout time.Duration) (string, error) {
	limit, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c := exec.CommandContext(limit, path)
	c.Env = []string{}        // not the environment of this process
	c.WaitDelay = time.Second // for the output of programs that it left running
	output, err := c.CombinedOutput()
	text := string(bytes.TrimSpace(output))
	found := regexp.MustCompile(`(?m)^CNI ip-masq plugin (version unknown|\S{1,64})$`).FindStringSubmatch(text)
	switch {
	case err == nil && found != nil:
		return found[1], nil
	case ctx.Err() != nil:
		return "", ErrStopped
	case limit.Err() != nil:
		err = fmt.Errorf("no answer within %s", timeout)
	case err == nil:
		err = errors.New("it is not the ip-masq plugin")
	}
	return "", fmt.Errorf("run %s: %w; it says %s; name the ip-masq plugin for %s with --plugin",
		name, err, policy.Quote(text), runtime.GOARCH)
}

// exists does not follow symlinks: in a container their targets may not be mounted.
func exists(root, path string) bool {
	_, err := os.Lstat(filepath.Join(root, path))
	return err == nil
}
