// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
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
func (c *Cluster) addNode(t T, number int, image []byte) (*Node, error) {
	name := fmt.Sprintf("node%d", number)
	n := &Node{Address: nodeAddress(number), Pods: nodePods(number), cluster: c}
	n.Addresses, n.PodRanges = []netip.Addr{n.Address}, []netip.Prefix{n.Pods}
	if c.options.DualStack {
		n.Addresses, n.PodRanges = append(n.Addresses, nodeAddress6(number)), append(n.PodRanges, nodePods6(number))
	}
	host, err := c.World.AddPod(name, n.Addresses...)
	if err != nil {
		return nil, err
	}
	for i, pods := range n.PodRanges {
		if err := route(c.World.Node, pods, n.Addresses[i]); err != nil {
			return nil, err
		}
	}
	n.Machine = machine.New(t, host)
	if err := n.furnish(t.Context(), image); err != nil {
		return nil, fmt.Errorf("furnish %s: %w", name, err)
	}
	return n, nil
}

func (n *Node) furnish(ctx context.Context, image []byte) error {
	for _, parameter := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := n.Sysctl(parameter, "1"); err != nil {
			return err
		}
	}
	for _, plugin := range []string{"bridge", "host-local", "portmap", "loopback"} {
		if err := n.Install(filepath.Join(n.cluster.options.Binaries.Own, "cni", plugin), "/opt/cni/bin/"+plugin); err != nil {
			return err
		}
	}
	if !n.cluster.options.NoNetwork {
		if err := n.WriteFile(ConflistPath, n.Conflist(), 0o644); err != nil {
			return err
		}
	}
	if err := n.prepareKubelet(ctx, n.cluster.plane.authority); err != nil {
		return err
	}
	var err error
	programs := n.cluster.options.Binaries.Containerd
	if n.Runtime, err = containerd.Start(ctx, n.Machine, containerd.Options{
		Programs: programs,
		// containerd looks here first for its shim; Debian's belongs to another version.
		Env: []string{"PATH=" + programs + string(filepath.ListSeparator) + os.Getenv("PATH")},
	}); err != nil {
		return err
	}
	return n.Runtime.Import(ctx, image)
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
	var node struct {
		Status struct{ Conditions []condition }
	}
	if err := n.cluster.Get(ctx, &node, "node", n.Name); err != nil {
		return false, "", err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True", c.Message, nil
		}
	}
	return false, "", fmt.Errorf("%s has no condition Ready yet", n.Name)
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
