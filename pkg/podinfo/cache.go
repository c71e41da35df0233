// SPDX-License-Identifier: Apache-2.0

package podinfo

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// CacheDir is where libcni keeps the result of each ADD. containerd and CRI-O use it.
const CacheDir = "/var/lib/cni/results"

// maxCached is the largest file of the cache that counts, in bytes.
const maxCached = 1 << 20

// Cached is an attachment in the cache.
type Cached struct {
	Network, ContainerID, IfName string
	Namespace, Name              string // of the pod, "" if they are not known
	Addresses                    []netip.Addr
	Config                       []byte // the configuration that the runtime had, mostly a conflist
	NetNS                        string // the path of the pod's network namespace
}

// File returns the name of the file in the cache that an attachment has.
func (c Cached) File() string { return c.Network + "-" + c.ContainerID + "-" + c.IfName }

// InFileName returns the attachments that the name of a file may mean, without reading the file. Networks and
// container IDs can have dashes in their names, so each dash before the last one may end the network's name.
// The last one is taken for the one before the interface.
func InFileName(file string) []Cached {
	last := strings.LastIndexByte(file, '-')
	var all []Cached
	for i := 1; i < last; i++ {
		if file[i] == '-' {
			all = append(all, Cached{Network: file[:i], ContainerID: file[i+1 : last], IfName: file[last+1:]})
		}
	}
	return all
}

// CacheFiles returns the names of the files in a cache, each with the time when it was written. A cache that
// does not exist is fs.ErrNotExist, and says nothing about files: in a container, it may not be mounted.
func CacheFiles(dir string) (map[string]time.Time, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, safefile.Error("read directory", dir, err)
	}
	files := make(map[string]time.Time, len(entries))
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) { // removed since
			continue
		}
		if err != nil {
			return nil, safefile.Error("stat", filepath.Join(dir, e.Name()), err)
		}
		if !info.IsDir() {
			files[e.Name()] = info.ModTime()
		}
	}
	return files, nil
}

// Reasons of UnreadableErrors.
const (
	irregular  = "its file in the runtime's cache is not a regular file"
	unreadable = "its file in the runtime's cache cannot be read"
	notOfRoot  = "its file in the runtime's cache does not belong to root"
	incomplete = "its file in the runtime's cache is incomplete or of an unknown form"
	ofProcess  = "the runtime names its network namespace by a process (/proc/PID/ns/net), " +
		"and another process may have that number now"
	unreadableNetNS = "its network namespace cannot be read"
)

// ErrNoNetNS reports that the network namespace of an attachment does not exist any more.
var ErrNoNetNS = errors.New("the network namespace does not exist")

// UnreadableError is why it is not known whose attachment a file of the cache is, or whether it still exists.
type UnreadableError struct {
	Reason string // the same for all files of one cause
	Err    error  // of this file; may be nil
}

// Error implements error.
func (e *UnreadableError) Error() string {
	if e.Err == nil {
		return e.Reason
	}
	return fmt.Sprintf("%s: %v", e.Reason, e.Err)
}

// Unwrap implements what errors.As needs.
func (e *UnreadableError) Unwrap() error { return e.Err }

// ReadCached reads a file of a cache. The attachment is of this boot if its network namespace exists. The
// time of the file does not say so: the wall clock may have been set since. The error is ErrNoNetNS if that
// namespace has gone, fs.ErrNotExist if the file has, and else an *UnreadableError. With ErrNoNetNS the
// attachment is complete; with an *UnreadableError it has what is known, which may be nothing.
func ReadCached(path string) (Cached, error) {
	if link, err := os.Lstat(path); err == nil && !link.Mode().IsRegular() {
		return Cached{}, &UnreadableError{Reason: irregular}
	}
	data, info, err := safefile.ReadFile(path, maxCached)
	if errors.Is(err, fs.ErrNotExist) {
		return Cached{}, err
	}
	if err != nil {
		return Cached{}, &UnreadableError{unreadable, err}
	}
	if uid, _ := safefile.Owner(info); uid != 0 {
		return Cached{}, &UnreadableError{Reason: notOfRoot}
	}
	if info.Mode()&0o022 != 0 {
		reason := fmt.Sprintf("users other than root may write its file in the runtime's cache (mode %04o)",
			info.Mode().Perm())
		return Cached{}, &UnreadableError{Reason: reason}
	}
	c, netNS, err := decode(data, filepath.Base(path))
	if err != nil {
		return c, &UnreadableError{incomplete, err}
	}
	c.NetNS = netNS
	return c, CheckNetNS(netNS)
}

// CheckNetNS returns nil if there is a network namespace at a path. The error is ErrNoNetNS if it has gone,
// and else an *UnreadableError. Only "does not exist" in a directory that this process sees means that it
// has gone. Everything else says nothing about the pod: a path below /proc names a process, whose number
// another process has later, and a container may lack the mount or the permission.
func CheckNetNS(path string) error {
	path = filepath.Clean(path)
	if strings.HasPrefix(path, "/proc/") {
		return &UnreadableError{Reason: ofProcess}
	}
	err := ns.IsNSorErr(path)
	if rest, below := strings.CutPrefix(path, "/var/run/"); below && isNoPath(err) {
		path = "/run/" + rest // an image may lack the symlink
		err = ns.IsNSorErr(path)
	}
	switch {
	case err == nil:
		return nil
	case !isNoPath(err):
		return &UnreadableError{unreadableNetNS, err}
	case !isDir(filepath.Dir(path)):
		reason := fmt.Sprintf("the directory of its network namespace, %s, does not exist here; "+
			"in a container, mount it", policy.Quote(filepath.Dir(path)))
		return &UnreadableError{Reason: reason}
	}
	return fmt.Errorf("%w: %s", ErrNoNetNS, policy.Printable(path))
}

func isNoPath(err error) bool {
	_, is := errors.AsType[ns.NSPathNotExistErr](err)
	return is
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// cacheFile is what libcni writes.
type cacheFile struct {
	Kind        string          `json:"kind"`
	ContainerID string          `json:"containerId"`
	Config      []byte          `json:"config"`
	IfName      string          `json:"ifName"`
	NetworkName string          `json:"networkName"`
	NetNS       string          `json:"netns"`
	CNIArgs     [][2]string     `json:"cniArgs"`
	Result      json.RawMessage `json:"result"`
}

func decode(data []byte, file string) (c Cached, netNS string, err error) {
	const kind = "cniCacheV1"
	var d cacheFile
	if err := json.Unmarshal(data, &d); err != nil {
		return c, "", err
	}
	c = Cached{Network: d.NetworkName, ContainerID: d.ContainerID, IfName: d.IfName, Config: d.Config}
	invalid := cmp.Or(utils.ValidateNetworkName(d.NetworkName), utils.ValidateContainerID(d.ContainerID),
		utils.ValidateInterfaceName(d.IfName))
	switch {
	case d.Kind != kind:
		err = fmt.Errorf("kind: is %.64q, and %q is what libcni writes", d.Kind, kind)
	case invalid != nil:
		err = invalid
	case c.File() != file:
		err = errors.New("its names are not those in the file's name")
	case len(d.Result) == 0 || string(d.Result) == "null":
		err = errors.New("result: is missing")
	}
	if err != nil {
		return Cached{}, "", err
	}
	result, err := create.CreateFromBytes(d.Result)
	if err != nil {
		return c, "", fmt.Errorf("result: %w", err)
	}
	netNS = cmp.Or(d.NetNS, sandboxOf(result, d.IfName))
	if !filepath.IsAbs(netNS) {
		return c, "", errors.New("netns: is not an absolute path, or is missing and result has none")
	}
	var args bytes.Buffer
	for _, pair := range d.CNIArgs {
		fmt.Fprintf(&args, "%s=%s;", pair[0], pair[1])
	}
	c.Namespace, c.Name = Names(args.String())
	c.Addresses = Addresses(Networks(result, d.IfName))
	return c, netNS, nil
}

// sandboxOf returns the network namespace of the pod's interface in a result. libcni before 1.2, which
// containerd 1 has, writes it nowhere else.
func sandboxOf(result types.Result, ifName string) string {
	for _, i := range current(result).Interfaces {
		if isPodInterface(i, ifName) {
			return i.Sandbox
		}
	}
	return ""
}

// SameConfig reports whether the runtime had this conflist, with or without plugins of a type.
func (c Cached) SameConfig(conflist []byte, pluginType string) bool {
	var had, has map[string]any
	if err := cmp.Or(json.Unmarshal(c.Config, &had), json.Unmarshal(conflist, &has)); err != nil {
		return false
	}
	return reflect.DeepEqual(had, has) || reflect.DeepEqual(had, without(has, pluginType))
}

func without(list map[string]any, pluginType string) map[string]any {
	plugins, _ := list["plugins"].([]any)
	others := []any{}
	for _, p := range plugins {
		plugin, _ := p.(map[string]any)
		if plugin["type"] != pluginType {
			others = append(others, p)
		}
	}
	rest := maps.Clone(list)
	rest["plugins"] = others
	return rest
}
