// SPDX-License-Identifier: Apache-2.0

package podinfo

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// MaxAddresses is how many addresses of one attachment count.
const MaxAddresses = 64

// Names returns the namespace and the name of the pod in CNI_ARGS, which the kubelet gives to the runtime.
// One that Kubernetes does not allow, or that is repeated with another value, is ""; Multus repeats some.
func Names(cniArgs string) (namespace, name string) {
	namespace = argument(cniArgs, "K8S_POD_NAMESPACE")
	if _, err := policy.ParseNamespace(namespace); err != nil {
		namespace = ""
	}
	name = argument(cniArgs, "K8S_POD_NAME")
	if !policy.IsPodName(name) {
		name = ""
	}
	return namespace, name
}

// argument returns the value of a key in CNI_ARGS, or "" if it has none, or different ones.
func argument(cniArgs, key string) string {
	value, found := "", false
	for pair := range strings.SplitSeq(cniArgs, ";") {
		k, v, _ := strings.Cut(pair, "=")
		if k != key {
			continue
		}
		if found && v != value {
			return ""
		}
		value, found = v, true
	}
	return value
}

// Networks returns the pod's addresses in a result, with their masks, without link-local ones.
func Networks(result types.Result, ifName string) (networks []net.IPNet) {
	r := current(result)
	for _, ip := range r.IPs {
		if ip == nil || ip.Interface != nil && !isOfPod(r.Interfaces, *ip.Interface, ifName) {
			continue
		}
		a := Address(ip.Address)
		if a.IsValid() && !a.IsLinkLocalUnicast() {
			networks = append(networks, ip.Address)
		}
	}
	return networks
}

// isOfPod reports whether an index is that of the pod's interface.
func isOfPod(interfaces []*types100.Interface, i int, ifName string) bool {
	return 0 <= i && i < len(interfaces) && isPodInterface(interfaces[i], ifName)
}

// HasHostInterface reports whether a result has an interface of the host, such as the
// host's end of a veth.
func HasHostInterface(result types.Result) bool {
	for _, i := range current(result).Interfaces {
		if i != nil && i.Sandbox == "" {
			return true
		}
	}
	return false
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
