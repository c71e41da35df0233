// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// entry is the plugin entry of a conflist, without its type.
type entry map[string]any

// stage is the topology of the demo and its state.
type stage struct {
	topology.T
	ctx    context.Context
	top    *topology.Topology
	cni    *topology.CNI
	pods   map[string]*pod
	policy *policy.Policy // the policy in force; nil without a plugin entry
}

type pod struct {
	*topology.Host
	addr netip.Addr
}

func (s *stage) title(text string) {
	fmt.Printf("\n%s\n%s\n", text, strings.Repeat("=", len([]rune(text))))
}

func (s *stage) say(text string) { fmt.Println(strings.TrimLeft(text, "\n") + "\n") }

// conflist writes the network's conflist, with the plugin entry if e is set.
func (s *stage) conflist(why string, e entry) {
	plugins := []any{json.RawMessage(`{"type": "bridge", "bridge": "cni0", "isGateway": true,
	  "ipam": {"type": "host-local", "subnet": "10.88.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]}}`)}
	s.policy = nil
	if e != nil {
		ours := maps.Clone(e)
		ours["type"] = "ip-masq"
		plugins = append(plugins, ours)
		fmt.Printf("  %s    (%s)\n\n", assert.Must(json.Marshal(ours))(s), why)
		s.policy = policyOf(ours)
	}
	list := assert.Must(json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": network, "plugins": plugins}))(s)
	assert.NoError(s, s.cni.Write("10-podnet.conflist", string(list)))
}

// policyOf parses the entry as the plugin does.
func policyOf(ours entry) *policy.Policy {
	conf := maps.Clone(ours)
	conf["name"] = network
	text, err := json.Marshal(conf)
	if err != nil {
		return nil
	}
	parsed, err := config.ReadNetconf(text).Entry()
	if err != nil {
		return nil // the plugin reports the error
	}
	source := policy.SourceID{Kind: policy.Network, Name: network}
	return &policy.Merge([]policy.Source{{ID: source, Policy: parsed.Policy}})[0]
}

// startPod runs ADD on a new pod.
func (s *stage) startPod(name string) {
	host, result := s.add(name)
	if result.ExitCode != 0 {
		s.Fatalf("ADD of %s: %s%s", name, result.Stdout, result.Stderr)
	}
	var answer struct {
		IPs []struct {
			Address netip.Prefix `json:"address"`
		} `json:"ips"`
	}
	assert.NoError(s, json.Unmarshal([]byte(result.Stdout), &answer))
	s.pods[name] = &pod{host, answer.IPs[0].Address.Addr()}
}

func (s *stage) add(name string) (*topology.Host, topology.Result) {
	host := s.top.NewPod(s, name)
	start := time.Now()
	result := assert.Must(s.cni.Add(s.ctx, network, host))(s)
	fmt.Printf("  cnitool add %s %s    (%d ms)\n", network, name, time.Since(start).Milliseconds())
	return host, result
}

// refused runs an ADD that must fail and shows the error message.
func (s *stage) refused(name string) {
	_, result := s.add(name)
	if result.ExitCode == 0 {
		s.Fatalf("ADD of %s was to fail, and did not", name)
	}
	message, _, _ := strings.Cut(result.Stderr, "\n") // the rest is cnitool's usage
	fmt.Printf("\n%s\n", indent(message))
}

func (s *stage) stopPod(name string) {
	if result := assert.Must(s.cni.Del(s.ctx, network, s.pods[name].Host))(s); result.ExitCode != 0 {
		s.Fatalf("DEL of %s: %s%s", name, result.Stdout, result.Stderr)
	}
	delete(s.pods, name)
}

func (s *stage) running() []string { return slices.Sorted(maps.Keys(s.pods)) }

// ask sends a packet to each destination and shows the source address that the receiver saw, and
// why.
func (s *stage) ask(from string, destinations ...netip.Addr) {
	p := s.pods[from]
	fmt.Printf("\n  %-7s %-12s to %-14s %-34s %s\n", "", "address", "", "the other side saw", "because")
	for _, dst := range destinations {
		seen := assert.Must(p.SendUDP(netip.AddrPortFrom(dst, topology.EchoPort), topology.Within(time.Second)))(s)
		s.expect(p, dst, seen)
		saw := seen.Source.Addr().String() + ", the node"
		if seen.Source.Addr() == p.addr {
			saw = p.addr.String() + ", the pod"
		}
		if !seen.Answered {
			saw += ": cannot answer"
		}
		fmt.Printf("  %-7s %-12s to %-14s %-34s %s\n", from, p.addr, dst, saw, s.because(dst))
	}
	fmt.Println()
}

// expect fails if the packet contradicts the policy, so that the demo never shows wrong
// addresses without a message.
func (s *stage) expect(p *pod, dst netip.Addr, seen topology.Seen) {
	if s.policy == nil {
		return
	}
	e := s.policy.Decide(policy.Packet{Dst: dst}).PrefixAction
	exempt := e != nil && e.Action == policy.ActionExempt
	if exempt != (seen.Source.Addr() == p.addr) {
		s.Fatalf("%s saw %s, which is wrong: %s", dst, seen.Source, s.because(dst))
	}
}

func (s *stage) because(dst netip.Addr) string {
	if s.policy == nil {
		return "nothing masquerades"
	}
	e := s.policy.Decide(policy.Packet{Dst: dst}).PrefixAction
	if e == nil {
		return "no prefix covers it: masquerade"
	}
	return fmt.Sprintf("%s is in %s", e.Prefix, e.Origins[0].Key)
}

// show runs a tool with its command line. A warning is a failure: the demo must not alarm its reader.
func (s *stage) show(name string, args ...string) {
	out, err := s.top.Node.Command(s.ctx, name, args...).CombinedOutput()
	if err != nil || strings.Contains("\n"+string(out), "\nwarning: ") {
		s.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	fmt.Printf("  $ %s %s\n%s\n", filepath.Base(name), strings.Join(args, " "), indent(string(out)))
}

func indent(text string) string {
	return "    " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n    ")
}

// until waits until a condition holds.
func (s *stage) until(what string, isSo func() bool) {
	const most = 5 * time.Second
	for start := time.Now(); !isSo(); time.Sleep(time.Millisecond) {
		if time.Since(start) > most {
			s.Fatalf("not within %s: %s", most, what)
		}
	}
}

func (s *stage) drift() {
	s.title("5. Another program flushes the ruleset")
	bin := topology.BinDir(s)
	reconciler := filepath.Join(bin, "ip-masq-reconciler")
	s.say("The plugin restores the rules with the next pod. The reconciler restores them at once.")
	fmt.Println("  ip-masq-reconciler run --cni-bin-dir bin &")
	run := s.top.Node.Command(s.ctx, reconciler, "run", "--cni-bin-dir", bin)
	assert.NoError(s, run.Start())
	defer func() { assert.NoError(s, errors.Join(run.Process.Signal(syscall.SIGTERM), run.Wait())) }()
	s.until("the reconciler is ready", func() bool { return s.top.Node.Command(s.ctx, reconciler, "status").Run() == nil })
	fmt.Println("  nft flush ruleset")
	assert.NoError(s, s.top.Node.Command(s.ctx, "nft", "flush", "ruleset").Run())
	flushed := time.Now()
	s.until("the rules are back", func() bool {
		return s.top.Node.Command(s.ctx, "nft", "list", "chain", "ip", "ip-masq", "masq-IP-MASQ-AGENT").Run() == nil
	})
	fmt.Printf("\n  The rules were seen again after %d ms.\n", time.Since(flushed).Milliseconds())
	s.ask("pod-4", lanServer, internet, s.pods["pod-2"].addr)
	s.show(reconciler, "explain", lanServer.String())
}
