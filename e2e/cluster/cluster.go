// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/machine"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Options are the options of a cluster.
type Options struct {
	Binaries Binaries
	// ProxyMode is the mode of kube-proxy: iptables or nftables.
	ProxyMode string
	// DualStack gives nodes, pods and Services IPv6 addresses too.
	DualStack bool
	// Internet makes the outside host answer nodes but not pods, at the ports of HTTP and DNS too.
	Internet bool
	// Taints are the taints with which nodes register.
	Taints []Taint
	// NoNetwork leaves the nodes without a conflist, so that they are not ready until the test
	// installs a main CNI plugin.
	NoNetwork bool
}

// Taint is a node's taint.
type Taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

// Cluster is a control plane with nodes and the topology around them.
type Cluster struct {
	// World is the topology with the LAN and the outside; its node is the cluster's router.
	World *topology.Topology
	Nodes []*Node

	options     Options
	directory   string
	control     *machine.Machine
	plane       *controlPlane
	proxyConfig string
}

// T is the part of testing.TB that this package uses.
type T interface {
	topology.T
	Context() context.Context
	TempDir() string
	Failed() bool
	Logf(format string, args ...any)
}

// New builds a cluster of two nodes for a test and waits until its nodes are ready, unless they have no network.
func New(t T, options Options) *Cluster {
	t.Helper()
	ctx := t.Context()
	c := &Cluster{World: topology.New(t, topology.Options{IsolateOutside: options.Internet}), options: options, directory: t.TempDir()}
	if options.Internet {
		c.connectInternet(t)
	}
	c.startControlPlane(t)
	c.proxyConfig = c.plane.authority.kubeconfig(t, c.plane.url, "system:kube-proxy")
	assert.NoError(t, os.WriteFile(filepath.Join(c.directory, "pod"), containerd.PodProgram(ctx, t), 0o755)) // for FromHost
	for number := 1; number <= 2; number++ {
		c.Nodes = append(c.Nodes, c.addNode(t, number))
	}
	// Runs before the machines are closed.
	t.Cleanup(func() {
		if t.Failed() {
			c.describe(t)
		}
	})
	assert.NoError(t, Await(ctx, Patience, func() error {
		if err := c.running(); err != nil {
			return err
		}
		// Pods can be created only after this object exists.
		_, err := c.Kubectl(ctx, "get", "serviceaccount", "default", "-o", "name")
		return err
	}))
	assert.NoError(t, c.Apply(ctx, proxyRights))
	for _, n := range c.Nodes {
		assert.NoError(t, n.Start())
	}
	if !options.NoNetwork {
		assert.NoError(t, c.AwaitReady(ctx))
	}
	return c
}

// connectInternet gives the outside host routes to the nodes, and servers.
func (c *Cluster) connectInternet(t T) {
	outside := c.World.Outside
	for _, nodes := range []netip.Prefix{netip.PrefixFrom(nodeAddress(0), 24).Masked(), nodes6()} {
		route(t, outside, nodes, c.World.NodeAddr(outside, nodes.Addr()))
	}
	for _, port := range []uint16{53, 80} {
		c.World.Observe(t, outside, port)
	}
}

// both returns the IPv4 prefix, and in a dual-stack cluster the IPv6 prefix too, as a flag's value.
func (c *Cluster) both(four, six netip.Prefix) string {
	if c.options.DualStack {
		return four.String() + "," + six.String()
	}
	return four.String()
}

// AwaitReady waits until the API server reports every node as ready.
func (c *Cluster) AwaitReady(ctx context.Context) error {
	for _, n := range c.Nodes {
		if err := n.AwaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// describe logs the objects of the API server.
func (c *Cluster) describe(t T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"describe", "nodes"},
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
	} {
		output, err := c.Kubectl(ctx, args...)
		t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, output)
	}
}

// proxyRights binds the built-in role of kube-proxy, as kubeadm does.
const proxyRights = `apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kube-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: system:kube-proxy}]
`

// running returns an error if a program of the cluster has ended by itself.
func (c *Cluster) running() error {
	err := running(c.control)
	for _, n := range c.Nodes {
		err = cmp.Or(err, running(n.Machine))
	}
	return err
}

// running returns a final error if a program that runs in the background of a
// machine has ended.
func running(m *machine.Machine) error {
	for _, d := range m.Daemons() {
		select {
		case <-d.Done():
			return final{fmt.Errorf("%s on %s has ended: %w: %s", d.Name, m.Name, d.Err(), tail(d.Output(), 2048))}
		default:
		}
	}
	return nil
}

// tail returns the end of a text, at most size bytes.
func tail(text string, size int) string {
	if len(text) > size {
		return "…" + text[len(text)-size:]
	}
	return text
}

// Patience is the time limit of an operation in a cluster on a slow machine.
const Patience = 45 * time.Second

// Await calls f at intervals until it returns nil or the time is over, and then returns the last
// error. It returns a final error at once.
func Await(ctx context.Context, within time.Duration, f func() error) error {
	began := time.Now()
	for pause := 20 * time.Millisecond; ; pause = min(pause*3/2, 500*time.Millisecond) {
		err := f()
		if err == nil {
			return nil
		}
		if errors.As(err, new(final)) {
			return err
		}
		if time.Since(began) > within {
			return fmt.Errorf("not within %s: %w", within, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w while waiting: %w", ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

// final is an error that waiting does not resolve.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// Kubectl runs kubectl as an administrator on the control plane's host and returns its standard
// output. The error has its standard error.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.kubectl(ctx, "", args...)
}

// Apply runs kubectl apply with YAML or JSON documents.
func (c *Cluster) Apply(ctx context.Context, text string) error {
	_, err := c.kubectl(ctx, text, "apply", "-f", "-")
	return err
}

// Get decodes the output of kubectl get ARGS -o json.
func (c *Cluster) Get(ctx context.Context, into any, args ...string) error {
	text, err := c.Kubectl(ctx, append(append([]string{"get"}, args...), "-o", "json")...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(text), into); err != nil {
		return fmt.Errorf("decode kubectl get %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func (c *Cluster) kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := c.control.Command(ctx, filepath.Join(c.options.Binaries.Kubernetes, "kubectl"), args...)
	cmd.Stdin = strings.NewReader(stdin)
	return c.asAdministrator(cmd)
}

// Shell runs commands of documents in a directory, as an administrator who has kubectl and helm.
func (c *Cluster) Shell(ctx context.Context, directory, script string) (string, error) {
	cmd := c.control.Command(ctx, "sh", "-exc", script)
	cmd.Dir = directory
	return c.asAdministrator(cmd)
}

func (c *Cluster) asAdministrator(cmd *topology.Cmd) (string, error) {
	b := c.options.Binaries
	path := strings.Join([]string{b.Kubernetes, filepath.Join(b.Own, "deploy"), os.Getenv("PATH")}, string(filepath.ListSeparator))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.plane.admin, "HOME="+c.directory, "PATH="+path)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
