// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Node is a machine of the cluster with containerd, kubelet and kube-proxy.
type Node struct {
	*machine.Machine
	// Address is the node's own address, which the LAN and the outside see of masqueraded packets.
	Address netip.Addr
	// Pods is the prefix of the node's pods.
	Pods netip.Prefix
	// Addresses and PodRanges are these two, and in a dual-stack cluster those of IPv6.
	Addresses []netip.Addr
	PodRanges []netip.Prefix
	// Runtime is the node's containerd.
	Runtime *containerd.Runtime

	cluster    *Cluster
	kubeconfig string
}

// Conflist returns the node's conflist without the plugin entry: bridge without ipMasq, and
// portmap.
func (n *Node) Conflist() string {
	var ranges, routes []string
	for _, pods := range n.PodRanges {
		ranges = append(ranges, fmt.Sprintf(`[{"subnet": %q}]`, pods))
		routes = append(routes, fmt.Sprintf(`{"dst": "%s/0"}`, map[bool]string{true: "0.0.0.0", false: "::"}[pods.Addr().Is4()]))
	}
	return fmt.Sprintf(`{
  "cniVersion": "1.1.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "isGateway": true,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [%s],
        "routes": [%s]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, strings.Join(ranges, ", "), strings.Join(routes, ", "))
}

// ConflistPath is the path of the node's conflist.
const ConflistPath = "/etc/cni/net.d/10-pods.conflist"

// addNode creates and configures the machine of a node without starting its programs.
func (c *Cluster) addNode(t T, number int) *Node {
	name := fmt.Sprintf("node%d", number)
	n := &Node{Address: nodeAddress(number), Pods: nodePods(number), cluster: c}
	n.Addresses, n.PodRanges = []netip.Addr{n.Address}, []netip.Prefix{n.Pods}
	if c.options.DualStack {
		n.Addresses, n.PodRanges = append(n.Addresses, nodeAddress6(number)), append(n.PodRanges, nodePods6(number))
	}
	host := c.World.AddPod(t, name, n.Addresses...)
	for i, pods := range n.PodRanges {
		route(t, c.World.Node, pods, n.Addresses[i])
	}
	n.Machine = machine.New(t, host)
	n.furnish(t)
	return n
}

func (n *Node) furnish(t T) {
	for _, parameter := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		assert.NoError(t, n.Sysctl(parameter, "1"))
	}
	for _, plugin := range []string{"bridge", "host-local", "portmap", "loopback"} {
		assert.NoError(t, n.Install(filepath.Join(n.cluster.options.Binaries.Own, "cni", plugin), "/opt/cni/bin/"+plugin))
	}
	if !n.cluster.options.NoNetwork {
		assert.NoError(t, n.WriteFile(ConflistPath, n.Conflist(), 0o644))
	}
	n.prepareKubelet(t, n.cluster.plane.authority)
	programs := n.cluster.options.Binaries.Containerd
	n.Runtime = containerd.New(t, n.Machine, containerd.Options{
		Programs: programs,
		// containerd looks here first for its shim; Debian's belongs to another version.
		Env: []string{"PATH=" + programs + string(filepath.ListSeparator) + os.Getenv("PATH")},
	})
}

// Start starts the programs of a node after containerd: kubelet and kube-proxy.
func (n *Node) Start() error {
	return errors.Join(n.StartKubelet(), n.StartProxy())
}

// Run runs a program on the node. The error has its output.
func (n *Node) Run(ctx context.Context, program string, args ...string) error {
	_, err := n.Output(ctx, program, args...)
	return err
}

// Output runs a program on the node and returns its standard output. The error has its standard
// error.
func (n *Node) Output(ctx context.Context, program string, args ...string) (string, error) {
	var stderr strings.Builder
	c := n.Command(ctx, program, args...)
	c.Stderr = &stderr
	stdout, err := c.Output()
	if err != nil {
		return string(stdout), fmt.Errorf("%s %s on %s: %w: %s%s", program, strings.Join(args, " "), n.Name, err, stderr.String(), stdout)
	}
	return string(stdout), nil
}

// condition is a condition of a node's status.
type condition struct{ Type, Status, Reason, Message string }

// Ready returns the node's condition Ready.
func (n *Node) Ready(ctx context.Context) (ready bool, message string, err error) {
	status, message, err := n.Condition(ctx, "Ready")
	if err == nil && status == "" {
		err = fmt.Errorf("%s has no condition Ready yet", n.Name)
	}
	return status == "True", message, err
}

// AwaitReady waits until the API server reports the node as ready.
func (n *Node) AwaitReady(ctx context.Context) error {
	return Await(ctx, Patience, func() error {
		if err := n.cluster.running(); err != nil {
			return err
		}
		ready, message, err := n.Ready(ctx)
		if err == nil && !ready {
			err = fmt.Errorf("%s is not ready: %s", n.Name, message)
		}
		return err
	})
}

// PowerFail ends every program of the node at once and removes what does not survive a boot: /run,
// rules, connections, the pods' links and cgroups.
func (n *Node) PowerFail(t T) {
	t.Helper()
	n.Reboot(t, func(link string) bool { return link == "eth0" })
	// Cgroups of killed processes can be removed only a moment later. kubelet would spend seconds
	// on each remaining one.
	assert.NoError(t, Await(t.Context(), Patience, func() error {
		return n.Run(t.Context(), "sh", "-ec", `for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
			if [ -d "$hierarchy$1" ]; then find "$hierarchy$1" -mindepth 1 -depth -type d -exec rmdir {} +; fi
		done`, "sh", n.Cgroup)
	}))
}

// Boot starts the programs of a node: containerd, kubelet and kube-proxy.
func (n *Node) Boot(t T) {
	t.Helper()
	assert.NoError(t, n.Runtime.Start(t.Context()))
	assert.NoError(t, n.Start())
}

// RemoveProject removes the project's image with a tag from the node, so that its pods cannot
// start.
func (n *Node) RemoveProject(ctx context.Context, tag string) error {
	ctr := filepath.Join(n.cluster.options.Binaries.Containerd, "ctr")
	return n.Run(ctx, ctr, "--namespace", "k8s.io", "images", "rm", "--sync", "ghcr.io/ip-masq/ip-masq-cni:"+tag)
}

// Readyz returns the status code and text of the reconciler's /readyz on the node.
func (n *Node) Readyz(ctx context.Context) (int, string, error) {
	return n.http(ctx, "http://127.0.0.1:19820/readyz")
}

// Metrics returns what the reconciler's /metrics on the node serves, with the component metrics of deploy/kustomize.
func (n *Node) Metrics(ctx context.Context) (string, error) {
	_, text, err := n.http(ctx, fmt.Sprintf("http://%s:19821/metrics", n.Address))
	return text, err
}

// http gets a URL from the node itself.
func (n *Node) http(ctx context.Context, url string) (int, string, error) {
	status, text, err := n.HTTPGet(ctx, url)
	if err != nil {
		return 0, "", fmt.Errorf("get %s on %s: %w", url, n.Name, err)
	}
	return status, text, nil
}

// podNetwork is the prefix of all pods, with a /24 for each node.
func podNetwork() netip.Prefix { return netip.MustParsePrefix("10.244.0.0/16") }

// controlAddress and nodeAddress are addresses of the LAN's private range, which is exempt.
func controlAddress() netip.Addr { return netip.MustParseAddr("192.168.100.2") }

func nodeAddress(number int) netip.Addr {
	return netip.AddrFrom4([4]byte{192, 168, 100, byte(10 + number)})
}

func nodePods(number int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(number), 0}), 24)
}

// nodes6, podNetwork6 and services6 are the IPv6 prefixes of a dual-stack cluster.
func nodes6() netip.Prefix      { return netip.MustParsePrefix("fd00:100::/64") }
func podNetwork6() netip.Prefix { return netip.MustParsePrefix("fd00:244::/48") }
func services6() netip.Prefix   { return netip.MustParsePrefix("fd00:96::/112") }

func nodeAddress6(number int) netip.Addr {
	address := nodes6().Addr().As16()
	address[15] = byte(10 + number)
	return netip.AddrFrom16(address)
}

func nodePods6(number int) netip.Prefix {
	address := podNetwork6().Addr().As16()
	address[7] = byte(number)
	return netip.PrefixFrom(netip.AddrFrom16(address), 64)
}

// route makes a host route a prefix by way of a gateway to which it has a route.
func route(t T, host *topology.Host, to netip.Prefix, gateway netip.Addr) {
	t.Helper()
	routes := assert.Must(host.Netlink.RouteGet(gateway.AsSlice()))(t)
	assert.NoError(t, host.Netlink.RouteReplace(&netlink.Route{
		LinkIndex: routes[0].LinkIndex,
		Dst:       &net.IPNet{IP: to.Addr().AsSlice(), Mask: net.CIDRMask(to.Bits(), to.Addr().BitLen())},
		Gw:        gateway.AsSlice(),
		Flags:     int(netlink.FLAG_ONLINK),
	}))
}
