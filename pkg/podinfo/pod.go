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
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// MaxAddresses is how many addresses of one attachment count.
const MaxAddresses = 64

// Names returns the namespace and the name of the pod in CNI_ARGS, which the kubelet gives to the runtime. One that
// Kubernetes does not allow, or that is repeated with another value, is ""; Multus repeats some.
func Names(cniArgs string) (namespace, name string) {
	isNamespace := func(s string) bool { _, err := policy.ParseNamespace(s); return err == nil }
	value := func(key string, isValid func(string) bool) string {
		var values []string
		for pair := range strings.SplitSeq(cniArgs, ";") {
			if k, v, _ := strings.Cut(pair, "="); k == key && !slices.Contains(values, v) {
				values = append(values, v)
			}
		}
		if len(values) != 1 || !isValid(values[0]) {
			return ""
		}
		return values[0]
	}
	return value("K8S_POD_NAMESPACE", isNamespace), value("K8S_POD_NAME", policy.IsPodName)
}

// Networks returns the pod's addresses in a result, with their masks, without link-local ones.
func Networks(result types.Result, ifName string) (networks []net.IPNet) {
	r := current(result)
	isPod := func(i int) bool { return 0 <= i && i < len(r.Interfaces) && isPodInterface(r.Interfaces[i], ifName) }
	for _, ip := range r.IPs {
		if ip == nil || ip.Interface != nil && !isPod(*ip.Interface) {
			continue
		}
		if a := Address(ip.Address); a.IsValid() && !a.IsLinkLocalUnicast() {
			networks = append(networks, ip.Address)
		}
	}
	return networks
}

// isPodInterface reports whether an interface is the pod's, and not one of the host with the same name.
func isPodInterface(i *types100.Interface, ifName string) bool {
	return i != nil && i.Name == ifName && i.Sandbox != ""
}

// current returns a result in the form of the newest version, or an empty one.
func current(result types.Result) *types100.Result {
	if result == nil {
		return &types100.Result{}
	}
	converted, _ := Convert(result, types100.ImplementedSpecVersion)
	r, _ := converted.(*types100.Result) // nil after an error
	return cmp.Or(r, &types100.Result{})
}

// Addresses returns the different addresses of networks, MaxAddresses at most.
func Addresses(networks []net.IPNet) (addresses []netip.Addr) {
	for _, n := range networks[:min(MaxAddresses, len(networks))] {
		if a := Address(n); !slices.Contains(addresses, a) {
			addresses = append(addresses, a)
		}
	}
	return addresses
}

// Address returns the address of a network.
func Address(n net.IPNet) netip.Addr {
	a, _ := netip.AddrFromSlice(n.IP)
	return a.Unmap()
}

// Convert converts a result. The CNI library panics if an item of a list is null.
func Convert(result types.Result, version string) (converted types.Result, err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("an item of interfaces, ips or routes is null")
		}
	}()
	return result.GetAsVersion(version)
}

// CacheDir is where libcni keeps the result of each ADD. containerd and CRI-O use it.
const CacheDir = "/var/lib/cni/results"

// Cached is an attachment in the cache.
type Cached struct {
	Network, ContainerID, IfName string
	Namespace, Name              string // of the pod, "" if they are not known
	Addresses                    []netip.Addr
	Config                       []byte // the configuration that the runtime had, mostly a conflist
}

// CacheFiles returns the names of the files in a cache that count, each with the time when ADD ended: regular files that
// were written since the boot and that only root may write.
func CacheFiles(dir string, boot time.Time) (map[string]time.Time, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, safefile.Error("read directory", dir, err)
	}
	files := make(map[string]time.Time, len(entries))
	for _, e := range entries {
		info, err := e.Info()
		if err != nil { // it has gone
			continue
		}
		if uid, _ := safefile.Owner(info); uid == 0 && info.Mode()&0o022 == 0 && info.Mode().IsRegular() && !info.ModTime().Before(boot) {
			files[e.Name()] = info.ModTime()
		}
	}
	return files, nil
}

// ErrNoNetNS reports that the network namespace of an attachment has gone.
var ErrNoNetNS = errors.New("the network namespace does not exist")

// ReadCached reads a file of a cache. An error means that it does not count yet, as it is incomplete while it is written, or,
// with ErrNoNetNS, not any more.
func ReadCached(path string) (Cached, error) {
	data, _, err := safefile.ReadFile(path, 1<<20)
	if err != nil {
		return Cached{}, err
	}
	c, netNS, err := decode(data, filepath.Base(path))
	if err == nil && !exists(netNS) {
		err = fmt.Errorf("%w: %s", ErrNoNetNS, policy.Printable(netNS))
	}
	return c, err
}

// exists reports whether a path is that of a network namespace. A file of an earlier boot is none. An image may lack the
// symlink from /var/run to /run.
func exists(netNS string) bool {
	err := ns.IsNSorErr(netNS)
	if rest, below := strings.CutPrefix(netNS, "/var/run/"); err != nil && below {
		err = ns.IsNSorErr("/run/" + rest)
	}
	return err == nil
}

func decode(data []byte, file string) (c Cached, netNS string, err error) {
	const kind = "cniCacheV1"
	var d struct {
		Kind        string          `json:"kind"`
		ContainerID string          `json:"containerId"`
		Config      []byte          `json:"config"`
		IfName      string          `json:"ifName"`
		NetworkName string          `json:"networkName"`
		NetNS       string          `json:"netns"`
		CNIArgs     [][2]string     `json:"cniArgs"`
		Result      json.RawMessage `json:"result"`
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return c, "", err
	}
	invalid := cmp.Or(utils.ValidateNetworkName(d.NetworkName), utils.ValidateContainerID(d.ContainerID), utils.ValidateInterfaceName(d.IfName))
	switch {
	case d.Kind != kind:
		return c, "", fmt.Errorf("kind: is %.64q, and %q is what libcni writes", d.Kind, kind)
	case invalid != nil:
		return c, "", invalid
	case d.NetworkName+"-"+d.ContainerID+"-"+d.IfName != file:
		return c, "", errors.New("its names are not those in the file's name")
	case len(d.Result) == 0 || string(d.Result) == "null":
		return c, "", errors.New("result: is missing")
	}
	result, err := create.CreateFromBytes(d.Result)
	if err != nil {
		return c, "", fmt.Errorf("result: %w", err)
	}
	if d.NetNS == "" { // libcni before 1.2, which containerd 1 has
		for _, i := range current(result).Interfaces {
			if isPodInterface(i, d.IfName) {
				d.NetNS = cmp.Or(d.NetNS, i.Sandbox)
			}
		}
	}
	if !filepath.IsAbs(d.NetNS) {
		return c, "", errors.New("netns: is not an absolute path, or is missing and result has none")
	}
	c = Cached{Network: d.NetworkName, ContainerID: d.ContainerID, IfName: d.IfName, Config: d.Config}
	var args bytes.Buffer
	for _, pair := range d.CNIArgs {
		fmt.Fprintf(&args, "%s=%s;", pair[0], pair[1])
	}
	c.Namespace, c.Name = Names(args.String())
	c.Addresses = Addresses(Networks(result, d.IfName))
	return c, d.NetNS, nil
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
	rest := maps.Clone(list)
	rest["plugins"] = slices.DeleteFunc(slices.Clone(plugins), func(p any) bool {
		plugin, _ := p.(map[string]any)
		return plugin["type"] == pluginType
	})
	return rest
}
