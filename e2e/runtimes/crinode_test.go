// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/containerd"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// criNode is a node with a containerd.
type criNode struct {
	*node
	*containerd.Runtime
}

// runtimes returns the containerds, each with the cniVersion of its conflists.
func runtimes() []struct{ name, programs, version string } {
	return []struct{ name, programs, version string }{
		{"containerd-1.6", containerd.Debian, "1.0.0"},
		{"containerd-2.4", "", "1.1.0"},
	}
}

// onEvery runs a test on a node of each runtime with each of the backends.
func onEvery(t *testing.T, forms []form, test func(t *testing.T, n *criNode)) {
	t.Helper()
	for _, r := range runtimes() {
		for _, f := range forms {
			t.Run(r.name+"/"+f.name, func(t *testing.T) {
				n := newNode(t, f)
				n.version = r.version
				runtime := containerd.New(t, n.Machine, containerd.Options{
					Programs: r.programs, Env: []string{"PATH=" + programDir}, Args: []string{"--log-level", "debug"},
				})
				if !strings.HasPrefix(runtime.Version, strings.TrimPrefix(r.name, "containerd-")+".") {
					t.Fatalf("the version is %s", runtime.Version)
				}
				test(t, &criNode{n, runtime})
			})
		}
	}
}

// ready waits until the network has the wanted readiness.
func (n *criNode) ready(t *testing.T, want bool) containerd.Condition {
	t.Helper()
	var last containerd.Condition
	until(t, 10*time.Second, "network ready", func() bool {
		last = topology.Must(n.NetworkReady(within(t)))(t)
		return last.Status == want
	})
	return last
}

// pod starts a pod and fails the test if that fails.
func (n *criNode) pod(t *testing.T, name string) *containerd.Pod {
	t.Helper()
	return topology.Must(n.RunPod(within(t), name))(t)
}

// firstPackets checks the first packets of a container to the destinations of the policy.
func (n *criNode) firstPackets(t *testing.T, p *containerd.Pod) {
	t.Helper()
	if err := p.FirstPackets(within(t), n.Topology, containerd.Destinations()); err != nil {
		t.Error(err)
	}
}

// end stops and removes pods; the runtime calls DEL for both.
func (n *criNode) end(t *testing.T, pods ...*containerd.Pod) {
	t.Helper()
	for _, p := range pods {
		must(t, p.Stop(within(t)))
		must(t, p.Remove(within(t)))
	}
}
