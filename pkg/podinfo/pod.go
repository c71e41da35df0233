// SPDX-License-Identifier: Apache-2.0

package podinfo

import (
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

// Networks returns the addresses that a result has for the pod's interface, with their masks and without link-local
// ones.
func Networks(result types.Result, ifName string) (networks []net.IPNet) {
	r := current(result)
	if r == nil {
		return nil
	}
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

// sandbox returns the network namespace that a result has for the pod's interface, "" if it has none.
func sandbox(result types.Result, ifName string) string {
	r := current(result)
	if r == nil {
		return ""
	}
	for _, i := range r.Interfaces {
		if isPodInterface(i, ifName) {
			return i.Sandbox
		}
	}
	return ""
}

// isPodInterface reports whether an interface is the pod's, and not one of the host with the same name.
func isPodInterface(i *types100.Interface, ifName string) bool {
	return i != nil && i.Name == ifName && i.Sandbox != ""
}

// current returns a result in the form of the newest version, or nil.
func current(result types.Result) *types100.Result {
	if result == nil {
		return nil
	}
	converted, err := Convert(result, types100.ImplementedSpecVersion)
	if err != nil {
		return nil
	}
	return converted.(*types100.Result)
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
