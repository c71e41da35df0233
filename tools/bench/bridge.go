// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// reference is a reference plugin with its configuration on a node, and the pods that it attaches
// and detaches.
type reference struct {
	name, plugin, stdin string
	node                *scene.Node
	pods                []*topology.Host
}

// newReference makes pods and writes the configuration.
func newReference(n *scene.Node, name, plugin string, pods int, conf map[string]any) (r reference, err error) {
	r = reference{name: name, plugin: plugin, node: n, stdin: filepath.Join(n.Dir, fmt.Sprintf("reference-%d", time.Now().UnixNano()))}
	conf["cniVersion"], conf["type"], conf["name"] = "1.0.0", plugin, "reference"
	text, err := json.Marshal(conf)
	if err != nil {
		return r, err
	}
	if err := os.WriteFile(r.stdin, text, 0o644); err != nil {
		return r, err
	}
	for i := range pods {
		pod, err := n.NewPod(fmt.Sprintf("%s-%d-%d", plugin, time.Now().UnixNano()%1e6, i))
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
		all = append(all, scene.Request{Plugin: r.plugin, Verb: verb, Stdin: r.stdin, Netns: pod.Path, Container: fmt.Sprintf("%s-%d", r.plugin, i)})
	}
	return all
}

// adds times concurrent ADDs; the DELs after them are not timed.
func (r reference) adds(pods int) measure.Contender {
	return measure.Contender{Name: r.name, Run: func(int) (float64, error) {
		took, err := r.node.RunAtOnce(r.requests("ADD", pods))
		_, undone := r.node.RunAtOnce(r.requests("DEL", pods))
		return milliseconds(took), errors.Join(err, undone)
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
	for key, value := range masquerade {
		conf[key] = value
	}
	return conf
}

// portmapConf is the configuration of plugin portmap with one host port.
func portmapConf(backend string) map[string]any {
	return map[string]any{
		"backend": backend, "snat": true, "capabilities": map[string]any{"portMappings": true},
		"runtimeConfig": map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}},
		"prevResult": map[string]any{
			"cniVersion": "1.0.0", "interfaces": []any{map[string]any{"name": "eth0", "sandbox": "/run/netns/x"}},
			"ips": []any{map[string]any{"address": "10.9.0.5/16", "gateway": "10.9.0.1", "interface": 0}},
		},
	}
}

// bridge measures the reference plugins, which write rules for each pod.
func (b *bench) bridge() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err != nil {
		return err
	}
	section := b.report.section("Reference plugins, which write rules for each pod")
	section.say("`bridge` and `portmap` of github.com/containernetworking/plugins write rules for each pod. ip-masq has one " +
		"chain for the node and verifies it.\n\n" +
		"*More than bridge alone* is the latency that masquerading adds to an ADD, in ms:\n\n" +
		"- `bridge`: the time with `ipMasq` minus the time without it.\n" +
		"- ip-masq: the time of its process, because it runs after `bridge`.\n\n" +
		"Each ADD is for a pod without a network. The time does not include the DEL. The reference plugins commit " +
		"rules for each pod, also on the nodes of ip-masq. Therefore each ADD of ip-masq reads the rules.")
	for _, place := range []struct {
		name  string
		nodes []*scene.Node
		pods  int
		limit measure.Limit
		full  bool
	}{
		{"One ADD", s.bare, 1, b.limit(20, 10*time.Second), false},
		{"One ADD with 5,000 third-party rules", s.full, 1, b.limit(12, 15*time.Second), true},
		{"20 concurrent ADDs", s.bare, atOnce, measure.Limit{Rounds: 6, Least: 3, Time: 15 * time.Second}, false},
		{"20 concurrent ADDs with 5,000 third-party rules", s.full, atOnce, measure.Limit{Rounds: 3, Least: 2, Time: 40 * time.Second, Cold: true}, true},
	} {
		if b.quick && place.pods > 1 {
			continue
		}
		if err := b.references(section, place.name, place.nodes, place.pods, place.limit, place.full); err != nil {
			return err
		}
	}
	return nil
}

// references compares all plugins on nodes of each backend.
func (b *bench) references(section *section, title string, nodes []*scene.Node, pods int, limit measure.Limit, full bool) error {
	const alone = "bridge without ipMasq"
	var refs []reference
	add := func(n *scene.Node, name, plugin string, conf map[string]any) error {
		r, err := newReference(n, name, plugin, pods, conf)
		refs = append(refs, r)
		return err
	}
	nft, legacy := nodes[1], nodes[2]
	conf := func(backend string) map[string]any { return map[string]any{"ipMasq": true, "ipMasqBackend": backend} }
	err := errors.Join(
		add(nft, alone, "bridge", bridgeConf(nft, 11, nil)),
		add(nft, "bridge with ipMasq, iptables-nft", "bridge", bridgeConf(nft, 12, conf("iptables"))),
		add(legacy, "bridge with ipMasq, iptables-legacy", "bridge", bridgeConf(legacy, 13, conf("iptables"))),
		add(nodes[0], "bridge with ipMasq, nftables", "bridge", bridgeConf(nodes[0], 14, conf("nftables"))),
	)
	if pods == 1 { // only one pod can use a host port
		err = errors.Join(err,
			add(nft, "portmap, iptables-nft", "portmap", portmapConf("iptables")),
			add(legacy, "portmap, iptables-legacy", "portmap", portmapConf("iptables")),
			add(nodes[0], "portmap, nftables", "portmap", portmapConf("nftables")))
	}
	if err != nil {
		return err
	}
	names := []string{empty}
	contenders := []measure.Contender{verifier{name: empty, plugin: "plugin-empty", node: nodes[0]}.concurrent(pods)}
	for _, n := range nodes {
		names = append(names, ipMasqName(n.Backend))
		contenders = append(contenders, verifier{name: ipMasqName(n.Backend), plugin: "ip-masq", node: n}.concurrent(pods))
	}
	for _, r := range refs {
		names = append(names, r.name)
		contenders = append(contenders, r.adds(pods))
	}
	f, err := measure.Interleave(limit, contenders...)
	if err != nil {
		return err
	}
	for i, backend := range []scene.Backend{nft.Backend, legacy.Backend, nodes[0].Backend} {
		line := map[bool]map[bool]string{false: {false: bridgeOne, true: bridgeOneFull}, true: {true: bridgeConcurrent}}[pods > 1][full]
		if line != "" {
			b.report.summarize(backend, line, f.Extra(refs[1+i].name, alone))
		}
	}
	rows := [][]string{{title, "ms", "× the empty plugin", "more than bridge alone, ms"}}
	for i, name := range names {
		more := "–"
		switch {
		case i <= len(nodes), i > len(nodes)+len(refs)-len(refs[4:]): // the plugins that run after bridge
			more = f.Of(name).String()
		case name != alone:
			more = f.Extra(name, alone).String()
		}
		rows = append(rows, []string{name, f.Of(name).String(), f.Ratio(name, empty).String(), more})
	}
	section.table(rows)
	return nil
}
