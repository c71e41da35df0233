// SPDX-License-Identifier: Apache-2.0

//go:build e2e_cluster

package cluster_test

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/cluster"
)

// nextRelease is the release to upgrade to.
const nextRelease = "v0.1.1"

// agentConfig is the agents' ConfigMap; it exempts a part of the outside.
const agentConfig = `apiVersion: v1
kind: ConfigMap
metadata: {name: ip-masq-agent, namespace: kube-system}
data:
  config: |
    nonMasqueradeCIDRs:
      - 10.0.0.0/8
      - 172.16.0.0/12
      - 192.168.0.0/16
      - 198.51.100.0/24
    resyncInterval: 60s
`

// TestUpgradeAndReboot checks every packet of continuous senders while the DaemonSet is upgraded
// and while a node fails and boots.
func TestUpgradeAndReboot(t *testing.T) {
	ctx := t.Context()
	c := newCluster(t, cluster.Options{ProxyMode: "nftables"})
	must(t, c.Apply(ctx, agentConfig))
	rollOut(t, c, "base", "ip-masq")
	exempt := netip.MustParsePrefix("198.51.100.0/24")
	s := &streams{
		Cluster: c, recorder: c.Record(t), exempt: exempt, began: time.Now(),
		to: []netip.Addr{c.World.LAN.Addrs[0], c.World.Outside.Addrs[0], exempt.Addr().Next()},
	}
	must(t, c.Start(ctx,
		s.pod("stream1", c.Nodes[0]), s.pod("stream2", c.Nodes[1]),
		cluster.Pod{Name: "stream-host", Node: c.Nodes[0], HostNetwork: true, Restart: true, Args: cluster.Streaming(s.to...)}))
	for _, n := range c.Nodes {
		s.awaitFrom(t, n.Pods, s.began)
	}
	s.awaitFrom(t, netip.PrefixFrom(c.Nodes[0].Address, 32), s.began)
	s.expectRight(t)

	t.Run("upgrade", func(t *testing.T) {
		s.upgrade(t, func() {
			s.ApplyOverlay(t, "images: [{name: ghcr.io/ip-masq/ip-masq-cni, newTag: "+nextRelease+"}]\n", "base")
			awaitRollout(t, c, "ip-masq")
		})
	})
	t.Run("reboot", func(t *testing.T) { s.reboot(t, c.Nodes[0]) })
}

// streams are continuous senders and their recorded packets.
type streams struct {
	*cluster.Cluster
	recorder *cluster.Recorder
	to       []netip.Addr
	exempt   netip.Prefix
	began    time.Time
}

func (s *streams) pod(name string, n *cluster.Node) cluster.Pod {
	return cluster.Pod{Name: name, Node: n, Restart: true, Args: cluster.Streaming(s.to...)}
}

// awaitFrom waits until every destination has received a packet from a network since a time.
func (s *streams) awaitFrom(t *testing.T, from netip.Prefix, since time.Time) {
	t.Helper()
	must(t, cluster.Await(t.Context(), cluster.Patience, func() error {
		seen := map[netip.Addr]bool{}
		for _, p := range s.recorder.Since(since) {
			if from.Contains(p.Self) {
				seen[p.To.Addr()] = true
			}
		}
		if len(seen) < len(s.to) {
			return fmt.Errorf("packets of %s arrived at %v, want %v", from, seen, s.to)
		}
		return nil
	}))
}

// expectRight fails the test if a packet so far had a wrong source address.
func (s *streams) expectRight(t *testing.T) {
	t.Helper()
	wrong := s.Wrong(s.recorder, s.began, s.exempt)
	for i, w := range wrong {
		if i == 10 {
			break
		}
		t.Error(w)
	}
	if len(wrong) > 0 {
		t.Fatalf("%d of %d packets had a wrong address", len(wrong), len(s.recorder.Since(s.began)))
	}
}

// upgrade rolls out the next release while pods start and end.
func (s *streams) upgrade(t *testing.T, rollOut func()) {
	t.Helper()
	ctx := t.Context()
	before := s.plugins(t)
	s.ImportProject(t, nextRelease)
	churn, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.churn(churn) }()
	rollOut()
	upgraded := time.Now()
	stop()
	must(t, <-done)
	for i, plugin := range s.plugins(t) {
		if bytes.Equal(plugin, before[i]) {
			t.Errorf("the plugin on node %d is the one from before", i+1)
		}
	}
	for _, n := range s.Nodes {
		s.awaitFrom(t, n.Pods, upgraded)
	}
	s.expectRight(t)
	t.Logf("%d packets, each from the right address", len(s.recorder.Since(s.began)))
}

// churn starts sending pods and deletes them until the context ends.
func (s *streams) churn(ctx context.Context) error {
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("churn-%d", i)
		// A round in progress is completed.
		whole := context.WithoutCancel(ctx)
		if err := s.Start(whole, s.pod(name, s.Nodes[i%len(s.Nodes)])); err != nil {
			return err
		}
		if err := s.Delete(whole, name); err != nil {
			return err
		}
	}
	return nil
}

// plugins returns the plugin's binary on each node.
func (s *streams) plugins(t *testing.T) [][]byte {
	t.Helper()
	var plugins [][]byte
	for _, n := range s.Nodes {
		plugins = append(plugins, assert.Must(os.ReadFile(n.Path("/opt/cni/bin/ip-masq")))(t))
	}
	return plugins
}

// reboot lets a node fail and boot. Its reconciler has no image and starts only when the test
// imports it.
func (s *streams) reboot(t *testing.T, n *cluster.Node) {
	ctx := t.Context()
	must(t, n.RemoveProject(ctx, nextRelease))
	n.PowerFail(t)
	// The node's packets so far have arrived: the longest path is a veth pair.
	booted := time.Now()
	n.Boot(t)
	s.awaitFrom(t, n.Pods, booted)
	t.Logf("the first pod sends %.1fs after the boot", time.Since(booted).Seconds())
	s.awaitFrom(t, netip.PrefixFrom(n.Address, 32), booted)
	if status, text, err := n.Readyz(ctx); err == nil {
		t.Errorf("the reconciler runs, so the plugin was not tested alone: %d %s", status, text)
	}
	s.expectRight(t)
	first := len(s.recorder.Since(booted))

	n.ImportProject(t, nextRelease)
	// kubelet backs off from a missing image, so the pod is replaced. The old pod is not waited
	// for.
	_ = assert.Must(s.Kubectl(ctx, "delete", "pod", "-n", "kube-system", "-l", "app.kubernetes.io/name=ip-masq",
		"--field-selector=spec.nodeName="+n.Name))(t)
	deleted := time.Now()
	awaitReadyz(t, n)
	t.Logf("the reconciler is ready %.1fs after the pod that could not start was gone", time.Since(deleted).Seconds())
	s.awaitFrom(t, n.Pods, time.Now())
	s.expectRight(t)
	t.Logf("%d packets before the reconciler was up, %d in all", first, len(s.recorder.Since(s.began)))
}
