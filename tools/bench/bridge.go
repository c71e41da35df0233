// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// reference is plugin bridge with its configuration on a node, and the pods that it attaches and
// detaches.
type reference struct {
	name, stdin string
	node        *scene.Node
	pods        []*topology.Host
}

// newReference makes pods and writes the configuration.
func newReference(n *scene.Node, name string, pods int, conf map[string]any) (r reference, err error) {
	r = reference{name: name, node: n, stdin: filepath.Join(n.Dir, fmt.Sprintf("reference-%d", time.Now().UnixNano()))}
	conf["cniVersion"], conf["type"], conf["name"] = "1.0.0", "bridge", "reference"
	text, err := json.Marshal(conf)
	if err != nil {
		return r, err
	}
	if err := os.WriteFile(r.stdin, text, 0o644); err != nil {
		return r, err
	}
	for i := range pods {
		pod, err := n.NewPod(fmt.Sprintf("bridge-%d-%d", time.Now().UnixNano()%1e6, i))
		if err != nil {
			return r, err
		}
		r.pods = append(r.pods, pod)
	}
	return r, nil
}

func (r reference) requests(verb string, pods int) []scene.Request {
	var all []scene.Request
	for i, pod := range r.pods[:pods] {
		all = append(all, scene.Request{Plugin: "bridge", Verb: verb, Stdin: r.stdin, Netns: pod.Path, Container: fmt.Sprintf("bridge-%d", i)})
	}
	return all
}

// adds times concurrent ADDs; the DELs after them are not timed.
func (r reference) adds(pods int) measure.Contender {
	return measure.Contender{Name: "plugin=" + r.name, Run: func(int) ([]measure.Value, error) {
		took, err := r.node.RunAtOnce(r.requests("ADD", pods))
		_, undone := r.node.RunAtOnce(r.requests("DEL", pods))
		return []measure.Value{wall(took)}, errors.Join(err, undone)
	}}
}

// bridgeConf is the configuration of plugin bridge. Each has its own subnet.
func bridgeConf(n *scene.Node, subnet int, masquerade map[string]any) map[string]any {
	conf := map[string]any{
		"bridge": fmt.Sprint("cni", subnet), "isGateway": true,
		"ipam": map[string]any{
			"type": "host-local", "dataDir": filepath.Join(n.Dir, fmt.Sprint("ipam", subnet)), "routes": []any{map[string]any{"dst": "0.0.0.0/0"}},
			"ranges": []any{[]any{map[string]any{"subnet": fmt.Sprintf("10.%d.0.0/16", subnet)}}},
		},
	}
	maps.Copy(conf, masquerade)
	return conf
}

// bridge measures plugin bridge, which commits rules for each pod, also on the nodes of ip-masq: each ADD
// of ip-masq reads the rules.
func (b *bench) bridge() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err != nil {
		return err
	}
	for _, place := range []struct {
		nodes       []*scene.Node
		rules, pods int
		limit       measure.Limit
	}{
		{s.bare, 0, 1, b.limit(20, 10*time.Second)},
		{s.full, scene.KubeProxyRules, 1, b.limit(12, 15*time.Second)},
		{s.bare, 0, atOnce, measure.Limit{Rounds: 6, Least: 3, Time: 15 * time.Second}},
		{s.full, scene.KubeProxyRules, atOnce, measure.Limit{Rounds: 3, Least: 2, Time: 40 * time.Second, Cold: true}},
	} {
		if b.quick && place.pods > 1 {
			continue
		}
		contenders, err := references(place.nodes, place.pods)
		if err != nil {
			return err
		}
		if _, err := b.compare(fmt.Sprintf("Reference/pods=%d/rules=%d", place.pods, place.rules), place.limit, contenders...); err != nil {
			return err
		}
	}
	return nil
}

// references returns the empty plugin, ip-masq and plugin bridge on nodes of each backend.
func references(nodes []*scene.Node, pods int) ([]measure.Contender, error) {
	contenders := []measure.Contender{verifier{name: "plugin=empty", program: empty, node: nodes[0]}.concurrent(pods)}
	for _, n := range nodes {
		contenders = append(contenders, verifier{name: "plugin=" + ipMasqOn(n.Backend), program: ipMasq, node: n}.concurrent(pods))
	}
	alone, err := newReference(nodes[1], "bridge", pods, bridgeConf(nodes[1], 11, nil))
	if err != nil {
		return nil, err
	}
	contenders = append(contenders, alone.adds(pods))
	for i, n := range nodes {
		masquerade := map[string]any{"ipMasq": true, "ipMasqBackend": n.Backend.Kind}
		r, err := newReference(n, "bridge-ipMasq-"+n.Backend.Name, pods, bridgeConf(n, 12+i, masquerade))
		if err != nil {
			return nil, err
		}
		contenders = append(contenders, r.adds(pods))
	}
	return contenders, nil
}
