// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestKeyMasqLinkLocalIPv6 sends from the node, because link-local packets are not forwarded.
// A masqueraded packet gets the link-local address of the node's interface.
func TestKeyMasqLinkLocalIPv6(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		addAddress(t, n.Node, "lan", vip6)
		to := netip.AddrPortFrom(netip.MustParseAddr("fe80::11%lan"), topology.EchoPort)
		for _, masquerade := range []bool{false, true, false} {
			n.conflist(t, "podnet", object{"masqLinkLocalIPv6": masquerade, "enableIPv6": true})
			n.pod(t, "podnet")
			sent := netip.AddrPortFrom(vip6, n.nextPort())
			seen := topology.Must(n.Node.SendUDP(to, topology.FromAddr(vip6), topology.FromPort(sent.Port())))(t)
			if masquerade == (seen.Source == sent) {
				t.Errorf("masqLinkLocalIPv6 %v: came from %s, was sent from %s", masquerade, seen.Source, sent)
			}
		}
	})
}

// TestIPv6NotTrackedUnlessEnabled checks with conntrack -L that IPv6 flows are tracked only if
// enableIPv6 is set: IPv6 NAT rules enable connection tracking.
func TestIPv6NotTrackedUnlessEnabled(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, managed := range []bool{false, true} {
			n.conflist(t, "podnet", object{"enableIPv6": managed})
			all := onlyPod(n.pod(t, "podnet"))
			all.verdicts(t, n, managed, flows{"pod": "2001:db8:5::5"})
			tracked := n.tool(t, "conntrack", "-L", "-f", "ipv6") != ""
			if tracked != managed {
				t.Errorf("enableIPv6 %v, but flows are tracked: %v", managed, tracked)
			}
		}
	})
}

// TestKeyRequireAgentConfig checks that ADD fails with code 11 until the agent files are stored.
func TestKeyRequireAgentConfig(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.conflist(t, "podnet", object{"requireAgentConfig": true})
		stdout, _, code := n.add(t, "podnet", n.newPod(t))
		if code == 0 {
			t.Errorf("cnitool: exit code 0\n%s", stdout)
		}
		stdout, _, _ = n.addDirect(t, n.newPod(t).Path, n.stdin(t, object{"requireAgentConfig": true}))
		if got := errorOf(t, stdout); got.Code != 11 || !strings.Contains(got.Msg, "requireAgentConfig") {
			t.Errorf("got %+v, want code 11 and the name of the key", got)
		}
		if rules := n.rules(t); strings.Contains(rules, "IP-MASQ-AGENT") {
			t.Errorf("there are rules:\n%s", rules)
		}
		n.conflist(t, "podnet", object{"requireAgentConfig": false})
		n.pod(t, "podnet")

		n.storeAgentFiles(t, policy.SourcePolicy{Chain: policy.DefaultChain, NonMasqueradeCIDRs: parsePrefixes("1.2.3.0/24")})
		n.conflist(t, "podnet", object{"requireAgentConfig": true})
		all := onlyPod(n.pod(t, "podnet"))
		all.verdicts(t, n, false, flows{"pod": "1.2.3.4"})
		all.verdicts(t, n, true, flows{"pod": "1.2.4.1 10.9.9.9"})
	})
}

// storeAgentFiles stores the policy of the agent files, as the reconciler does.
func (n *node) storeAgentFiles(t *testing.T, s policy.SourcePolicy) {
	t.Helper()
	lock, err := store.Open(n.dataDir).Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	staged, err := lock.Stage(policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: s})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(staged.Commit(), lock.Release()); err != nil {
		t.Fatal(err)
	}
}

// TestKeyCIDRLimit checks that the limit applies to the entries of both lists together.
func TestKeyCIDRLimit(t *testing.T) {
	t.Parallel()
	lists := func(exempt, masquerade int) object {
		keys := object{}
		for list, count := range map[string]int{"nonMasqueradeCIDRs": exempt, "masqueradeCIDRs": masquerade} {
			cidrs := []string{}
			for i := range count {
				cidrs = append(cidrs, fmt.Sprintf("10.%d.%d.0/24", exempt, i+100))
			}
			keys[list] = cidrs
			exempt++ // the second list gets other prefixes
		}
		return keys
	}
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, c := range []struct {
			limit              any
			exempt, masquerade int
			code               uint
		}{{nil, 60, 4, 0}, {nil, 60, 5, 7}, {nil, 65, 0, 7}, {70, 65, 5, 0}, {70, 65, 6, 7}, {1, 1, 0, 0}, {1, 1, 1, 7}} {
			keys := lists(c.exempt, c.masquerade)
			if c.limit != nil {
				keys["cidrLimit"] = c.limit
			}
			stdout, _, _ := n.addDirect(t, n.newPod(t).Path, n.stdin(t, keys))
			got := errorOf(t, stdout)
			if got.Code != c.code || c.code != 0 && !strings.Contains(got.Msg, "cidrLimit") {
				t.Errorf("limit %v, %d and %d entries: got %+v, want code %d", c.limit, c.exempt, c.masquerade, got, c.code)
			}
		}
	})
}

// TestKeyMasqChain checks that the chain has the configured name.
func TestKeyMasqChain(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		inForce := func(name string) bool {
			return strings.Contains(n.rules(t), map[bool]string{true: "chain masq-" + name + " {", false: ":" + name + " "}[n.backend.variant == ""])
		}
		for _, name := range []string{"IP-MASQ-AGENT", "4net_of.Mine-24-letters-", "ip"} {
			keys := object{"masqChain": name}
			if name == "IP-MASQ-AGENT" {
				keys = object{}
			}
			n.conflist(t, "podnet", keys)
			all := onlyPod(n.pod(t, "podnet"))
			all.verdicts(t, n, true, flows{"pod": "1.2.3.4"})
			all.verdicts(t, n, false, flows{"pod": "10.9.9.9"})
			if !inForce(name) {
				t.Errorf("no chain %s:\n%s", name, n.rules(t))
			}
			if name != "IP-MASQ-AGENT" && inForce("IP-MASQ-AGENT") {
				t.Errorf("chain IP-MASQ-AGENT exists beside %s:\n%s", name, n.rules(t))
			}
		}
	})
}

func onlyPod(p *pod) senders { return senders{"pod": {p.Host, p.addrs}} }

// TestKeyBackend changes the backend on a node with the programs of each backend. It checks that
// the rules move and no other backend keeps any.
func TestKeyBackend(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		nftables, own := backends()[0], n.backend
		for _, step := range []struct {
			asked any
			want  backend
		}{{nil, own}, {"nftables", nftables}, {"auto", nftables}, {own.setting, own}, {"auto", own}} {
			n.conflist(t, "podnet", object{"backend": step.asked})
			all := onlyPod(n.pod(t, "podnet"))
			all.verdicts(t, n, true, flows{"pod": "1.2.3.4"})
			all.verdicts(t, n, false, flows{"pod": "10.9.9.9"})
			for _, f := range backends() {
				if exists, want := n.hasRulesIn(t, f), f == step.want; exists != want {
					t.Errorf("backend %v: chain exists in %s: %v, want %v", step.asked, f.name, exists, want)
				}
			}
		}
	})
}

// hasRulesIn reports whether a backend has rules of ip-masq.
func (n *node) hasRulesIn(t *testing.T, f backend) bool {
	t.Helper()
	if f.variant == "" {
		return strings.Contains(n.tool(t, "nft", "list", "tables"), "ip-masq")
	}
	return strings.Contains(n.tool(t, "iptables-"+f.variant+"-save"), "IP-MASQ-AGENT")
}

// TestKeyBackendUnavailable requests iptables on a node without iptables.
func TestKeyBackendUnavailable(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	stdout, _, _ := n.addDirect(t, n.newPod(t).Path, n.stdin(t, object{"backend": "iptables"}))
	if got := errorOf(t, stdout); got.Code != 100 || !strings.Contains(got.Msg, "iptables") {
		t.Errorf("got %+v, want code 100 and the missing program", got)
	}
}

// TestKeyDataDir checks that the state is in the configured dataDir and the chain names it.
func TestKeyDataDir(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		for _, dir := range []string{filepath.Join(n.dir, "elsewhere", "state"), ""} {
			n := newNode(t, n.backend)
			want, where, value := dir, dir, any(dir)
			if dir == "" {
				want, where, value = "/var/lib/cni/ip-masq", n.own("/var/lib/cni/ip-masq"), nil
			}
			n.conflist(t, "podnet", object{"dataDir": value})
			n.pod(t, "podnet")
			entries, err := os.ReadDir(where)
			if err != nil || len(entries) == 0 {
				t.Errorf("dataDir %v: %v, %v", value, entries, err)
			}
			if !strings.Contains(n.rules(t), "keeps its state in "+want) {
				t.Errorf("the chain does not name %s:\n%s", want, n.rules(t))
			}
			// A second dataDir on the node is refused.
			stdout, _, _ := n.addDirect(t, n.newPod(t).Path, n.stdin(t, object{"dataDir": n.dir + "/second"}))
			if got := errorOf(t, stdout); got.Code != 7 || !strings.Contains(got.Msg, want) {
				t.Errorf("a second dataDir: got %+v, want code 7 and %s", got, want)
			}
		}
	})
}

// stdin returns the plugin's standard input for ADD.
func (n *node) stdin(t *testing.T, keys object) string {
	t.Helper()
	entry := n.entry(keys)
	entry["cniVersion"], entry["name"] = "1.1.0", "podnet"
	entry["prevResult"] = object{"cniVersion": "1.1.0"}
	text, err := json.Marshal(entry)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// cniError is an error result of the CNI specification; the zero value means success.
type cniError struct {
	Code uint
	Msg  string
}

func errorOf(t *testing.T, stdout string) cniError {
	t.Helper()
	var e cniError
	if err := json.Unmarshal([]byte(stdout), &e); err != nil {
		t.Fatalf("the plugin printed %q: %v", stdout, err)
	}
	return e
}
