// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestFindings has each situation, and one much like it that is none. What a
// case wants is all that is found: "problem ID" or "notice ID", then what the
// details and the remedy have to say.
func TestFindings(t *testing.T) {
	for _, tc := range []struct {
		name string
		set  func(*testHost)
		want map[string]string
	}{
		{name: "a healthy node", set: func(*testHost) {}},

		{"two chains without a scope", func(h *testHost) {
			h.policies = append(h.policies, policy.SourcePolicy{Chain: "OTHER", NonMasqueradeCIDRs: prefixes("10.0.0.0/8", "11.0.0.0/8", "172.16.0.0/12")})
		}, map[string]string{"problem two-unscoped-chains": "IP-MASQ-AGENT exempts 192.168.0.0/16, which OTHER masquerades"}},
		{name: "two chains with other ports, one of which exempts the sources of the other", set: func(h *testHost) {
			h.policies = []policy.SourcePolicy{{Chain: "A", NonMasqueradeSourceCIDRs: prefixes("10.244.0.0/16")},
				{Chain: "B", SourceCIDRs: prefixes("10.244.0.0/16"), ToPorts: &policy.Ports{{First: 40000, Last: 40999}}}}
		}},
		{name: "two chains that exempt the same", set: func(h *testHost) {
			h.policies = append(h.policies, policy.SourcePolicy{Chain: "OTHER"})
		}},
		{name: "two chains with scopes apart", set: func(h *testHost) {
			h.policies = []policy.SourcePolicy{{Chain: "A", SourceCIDRs: prefixes("10.244.0.0/16")},
				{Chain: "B", SourceCIDRs: prefixes("10.245.0.0/16"), NonMasqueradeCIDRs: prefixes("10.245.0.0/16")}}
		}},
		{"two chains with scopes that overlap", func(h *testHost) {
			h.policies = []policy.SourcePolicy{{Chain: "A", SourceCIDRs: prefixes("10.244.0.0/16"), NonMasqueradeCIDRs: prefixes("10.0.0.0/8")},
				{Chain: "B", SourceCIDRs: prefixes("10.0.0.0/8"), NonMasqueradeCIDRs: prefixes("10.0.0.0/8", "11.0.0.0/8")}}
		}, map[string]string{"problem two-unscoped-chains": "B exempts 11.0.0.0/8, which A masquerades"}},
		{name: "two chains for interfaces apart", set: func(h *testHost) {
			h.policies = []policy.SourcePolicy{{Chain: "A", OutputInterfaces: []string{"eth0"}}, {Chain: "B", OutputInterfaces: []string{"wg+"}, NonMasqueradeCIDRs: prefixes()}}
		}},

		{"ipMasq of the main plugin", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "bridge", "ipMasq": true}`, entry)
		}, map[string]string{"problem main-plugin-ipmasq": `plugins[0] ("bridge") has "ipMasq": true`}},
		{"ipMasq of a delegate", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "flannel", "delegate": {"ipMasq": true}}`, entry)
		}, map[string]string{"problem main-plugin-ipmasq": `plugins[0] ("flannel")`}},
		{name: "ipMasq off, and in a list without us", set: func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "bridge", "ipMasq": false}`, entry)
			h.files["etc/cni/net.d/20-else.conflist"] = conflist("else", `{"type": "bridge", "ipMasq": true}`)
		}},

		{"two entries", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge, entry, entry)
		}, map[string]string{"problem duplicate-entry": "plugins[1], "}},
		{name: "an equal entry in another program's copy of the conflist", set: func(h *testHost) {
			h.files["etc/cni/net.d/02-istio-cni.conflist"] = conflist("pods", bridge, entry, `{"type": "istio-cni"}`)
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge, entry)
		}},
		{"another entry in another program's copy of the conflist", func(h *testHost) {
			h.files["etc/cni/net.d/02-istio-cni.conflist"] = conflist("pods", bridge, `{"type": "ip-masq", "cidrLimit": 7}`, `{"type": "istio-cni"}`)
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge, entry)
		}, map[string]string{"notice unused-entry": `10-pods.conflist" differs from that of , 02-istio-cni.conflist" in cidrLimit`}},
		{name: "no plugin, and nothing names it", set: func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge)
			h.edit = func(n *Host) {
				n.BinDir, n.DataDir = n.Root, "/srv/masq"
				n.State.Sources[0].ID = policy.SourceID{Kind: policy.AgentFiles}
			}
		}, want: map[string]string{"notice conflist-without-us": `(network "pods")`}},
		{"what a dry run warns about", func(h *testHost) {
			warnings := map[string]string{"conflist-broken": "20-x.conflist", "damaged-document": "/d is torn\nor so", "agent-files-invalid": "ip-masq-agent:3: nonMasq",
				"agent-files-missing": "/etc/config is gone", "unknown-key": "ip-masq-agent:4: nonMasqueradeCIDR", "multus": "delegates", "entry-differs": "in guard", "entry-file-missing": "gone", "conflist-not-exchanged": "vfat", "conflist-copy": "05-ip-masq.conflist", "slow-list": "71 prefixes", "pods-without-room": "3 of these", "ports-not-random": "older than 1.6.2", "listen-failed": "health_listen: in use"}
			h.edit = func(n *Host) {
				n.Warnings = func(id string) (found []error) {
					if text, ok := warnings[id]; ok {
						found = append(found, errors.New(text))
					}
					return found
				}
			}
		}, map[string]string{"problem conflist-broken": "20-x.conflist", "problem damaged-document": "/d is torn, or so", "notice agent-files-invalid": "nonMasq, ConfigMap", "notice agent-files-missing": "is gone, Mount", "problem unknown-key": "agent:4, Correct the names", "problem multus": "delegates, restart Multus", "problem entry-differs": "in guard, install --replace", "notice entry-file-missing": "gone, Write the file again", "notice conflist-not-exchanged": "vfat, RENAME_EXCHANGE", "problem conflist-copy": "05-ip-masq.conflist, manage = true", "notice slow-list": "71 prefixes", "problem pods-without-room": "3 of these, Set backend to nftables", "notice ports-not-random": "older than 1.6.2, Install iptables 1.6.2", "problem listen-failed": "health_listen, ss -ltnp"}},
		{"a conflist before the one with the entry", func(h *testHost) { h.files["etc/cni/net.d/05-else.conflist"] = conflist("else", bridge) },
			map[string]string{"problem conflist-without-us": `05-else.conflist" (network "else")`}},
		{"a conflist that lost its entry, and no policy any more", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"], h.files["opt/cni/bin/ip-masq"] = conflist("pods", bridge), ""
			h.policies = nil
			h.edit = func(n *Host) {
				n.BinDir = filepath.Join(n.Root, "opt/cni/bin")
				assert.NoError(h.t, os.Chmod(filepath.Join(n.BinDir, "ip-masq"), 0o755))
			}
		}, map[string]string{"problem conflist-without-us": `(network "pods"), no policy is in force: ip-masq masquerades nothing, manage = true`}},
		{name: "one that chooses among the others", set: func(h *testHost) {
			h.files["etc/cni/net.d/00-multus.conf"] = `{"cniVersion": "0.3.1", "name": "m", "type": "multus"}`
			h.files["etc/cni/net.d/01-lo.conf"] = `{"cniVersion": "0.3.1", "name": "lo", "type": "loopback"}`
		}},
		{"agent files alone", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", bridge)
			h.edit = func(n *Host) { n.State.Sources[0].ID = policy.SourceID{Kind: policy.AgentFiles} }
		}, map[string]string{"notice conflist-without-us": `(network "pods"), replaces an agent`}},
		{"no conflist", func(h *testHost) { delete(h.files, "etc/cni/net.d/10-pods.conflist") },
			map[string]string{"problem conflist-absent": "has no conflist, Install the main CNI plugin"}},
		{"a directory that cannot be read", func(h *testHost) {
			h.edit = func(n *Host) {
				n.ConfDir, n.ConfDirErr = config.ConfDir{}, &fs.PathError{Op: "open", Path: "/d", Err: fs.ErrPermission}
			}
		}, map[string]string{"notice not-examined": "open /d"}},

		{"a pod network of host-local", func(h *testHost) { h.policies[0].NonMasqueradeCIDRs = prefixes("10.244.1.0/25") },
			map[string]string{"problem pod-network-not-exempt": "masquerades 10.244.1.128/25 of pod network 10.244.1.0/24"}},
		{"pod networks in other keys", func(h *testHost) {
			h.policies[0].EnableIPv6 = new(true)
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "ptp", "ipam": {"type": "host-local", "subnet": "100.64.0.0/16"}}`,
				`{"type": "x", "podCidr": "100.65.0.0/16", "ipam": {"ipv4_pools": ["100.66.0.0/16"], "ipv6_pools": ["2001:db8::/64"], "subnet": "usePodCidr"}}`, entry)
		}, map[string]string{"problem pod-network-not-exempt": "pod network 100.64.0.0/16, pod network 100.65.0.0/16, pod network 100.66.0.0/16, pod network 2001:db8::/64"}},
		{"pod networks that the policy states", func(h *testHost) {
			h.policies[0].SourceCIDRs, h.policies[0].PodCIDRs = prefixes("100.72.0.0/16", "100.75.0.0/16", "10.0.0.0/8", "::/0"), prefixes("100.75.1.0/24")
			h.policies[0].NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "100.75.0.0/17")
		}, map[string]string{"problem pod-network-not-exempt": "of pod network 100.72.0.0/16, masquerades 100.75.128.0/17 of pod network 100.75.0.0/16"}},
		{"a pod network in podCIDRs", func(h *testHost) { h.policies[0].PodCIDRs = prefixes("100.73.0.0/16") },
			map[string]string{"problem pod-network-not-exempt": "pod network 100.73.0.0/16"}},
		{"a pod network that ADDs found", func(h *testHost) {
			h.edit = func(n *Host) { n.Rules.Chains[0].Policy.PodSubnets = prefixes("10.9.0.0/24", "100.74.0.0/24") }
		}, map[string]string{"problem pod-network-not-exempt": "pod network 100.74.0.0/24"}},
		{"pods with /32 addresses", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", calico, entry)
			h.policies[0].NonMasqueradeCIDRs = prefixes("10.42.0.9/32")
			h.edit = func(n *Host) { n.Pods = onRecord("10.42.0.5", "10.42.0.6", "10.42.0.9") }
		}, map[string]string{"problem pod-network-not-exempt": `traffic between pods of network "pods": to 10.42.0.5, 10.42.0.6` + "\n"}},
		{name: "one pod alone", set: func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", calico, entry)
			h.policies[0].NonMasqueradeCIDRs = prefixes()
			h.edit = func(n *Host) { n.Pods = append(onRecord("10.42.0.5"), onRecord("fd00::5")...) }
		}},
		{name: "pods whose sources are exempt", set: func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", calico, entry)
			h.policies[0].NonMasqueradeCIDRs, h.policies[0].NonMasqueradeSourceCIDRs = prefixes(), prefixes("10.42.0.0/16")
			h.edit = func(n *Host) { n.Pods = onRecord("10.42.0.5", "10.42.0.6") }
		}},
		{"pods whose packets pass no hook", func(h *testHost) {
			h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "macvlan", "master": "eth0"}`, entry)
			h.policies[0].NonMasqueradeCIDRs = prefixes()
			h.edit = func(n *Host) { n.Pods = onRecord("10.42.0.5", "10.42.0.6") }
		}, map[string]string{"notice no-effect": `network "pods", 10-pods.conflist"): macvlan, mode l3s`}},
		{name: "macvlan without an entry", set: func(h *testHost) {
			h.files["etc/cni/net.d/20-second.conflist"] = conflist("second", `{"type": "macvlan", "master": "eth0"}`)
		}},

		{"interfaces that the node lacks", func(h *testHost) { h.policies[0].OutputInterfaces = []string{"ens5", "tun+"} },
			map[string]string{"problem scope-matches-nothing": `outputInterfaces of network "pods" names ens5, tun+, the node has cni0, eth0, wg0, eth+`}},
		{name: "an interface that it has", set: func(h *testHost) { h.policies[0].OutputInterfaces = []string{"ens5", "eth+"} }},
		{"sourceCIDRs without a pod", func(h *testHost) {
			h.policies[0].SourceCIDRs, h.policies[0].PodCIDRs = prefixes("10.9.0.0/16", "10.8.0.0/16"), prefixes("10.244.0.0/16")
			h.edit = func(n *Host) { n.Pods = onRecord("10.244.1.5", "10.244.1.6", "fd00::5") }
		}, map[string]string{"problem scope-matches-nothing": `sourceCIDRs of network "pods" has 10.8.0.0/16, pods have 10.244.1.5, 10.244.1.6`}},
		{"sourceCIDRs of the family that no pod has", func(h *testHost) {
			h.policies[0].EnableIPv6, h.policies[0].SourceCIDRs = new(true), prefixes("fd00::/8")
			h.policies[0].NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "fd00::/8")
			h.edit = func(n *Host) { n.Pods = onRecord("10.244.1.5") }
		}, map[string]string{"problem scope-matches-nothing": `sourceCIDRs of network "pods" has fd00::/8, pods have 10.244.1.5`}},
		{name: "sourceCIDRs of one family, and pods of both", set: func(h *testHost) {
			h.policies[0].EnableIPv6, h.policies[0].SourceCIDRs = new(true), prefixes("fd00::/64")
			h.policies[0].NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "fd00::/8")
			h.edit = func(n *Host) { n.Pods = onRecord("10.244.1.5", "fd00::5") }
		}},
		{"podCIDRs without a pod", func(h *testHost) {
			h.policies[0].EnableIPv6, h.policies[0].PodCIDRs = new(true), prefixes("10.244.1.0/24", "fd00:9::/64")
			h.policies[0].NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "fd00::/8")
			h.edit = func(n *Host) { n.Pods = onRecord("10.244.1.5", "fd00::5") }
		}, map[string]string{"problem scope-matches-nothing": `podCIDRs of network "pods" has fd00:9::/64, pods have fd00::5`}},
		{name: "sourceCIDRs with a pod", set: func(h *testHost) {
			h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16", "10.244.1.6/32")
			h.edit = func(n *Host) { n.Pods = onRecord("10.244.1.5", "10.244.1.6") }
		}},
		{name: "sourceCIDRs of a network without pods", set: func(h *testHost) {
			h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16")
			h.edit = func(n *Host) {
				n.Pods = []store.Pod{{Attachment: store.Attachment{Network: "other"}, Addresses: addresses("10.8.0.5")}}
			}
		}},
		{"sourceCIDRs of agent files", func(h *testHost) {
			h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16")
			h.edit = func(n *Host) {
				n.State.Sources[0].ID = policy.SourceID{Kind: policy.AgentFiles}
				n.Pods = onRecord("10.244.1.5")
			}
		}, map[string]string{"problem scope-matches-nothing": "pods have 10.244.1.5"}},
		{name: "a pod network out of scope", set: func(h *testHost) {
			h.policies[0].NonMasqueradeCIDRs, h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16"), prefixes("10.9.0.0/16")
		}},
		{name: "a pod network whose sources are exempt", set: func(h *testHost) {
			h.policies[0].NonMasqueradeCIDRs, h.policies[0].NonMasqueradeSourceCIDRs = prefixes(), prefixes("10.244.0.0/16")
		}},

		{"an agent", func(h *testHost) {
			h.files["proc/9/cmdline"] = "/bin/ip-masq-agent-v2\x00--masq-chain=X\x00"
		}, map[string]string{"problem agent-running": `process 9 ("/bin/ip-masq-agent-v2 --masq-chain=X")`}},
		{name: "a process of another user, who can name it as he likes", set: func(h *testHost) {
			h.files["proc/9/cmdline"] = "ip-masq-agent\x00"
			h.edit = func(n *Host) {
				assert.NoError(h.t, os.Chown(filepath.Join(n.Root, "proc/9"), 65534, 65534))
			}
		}},
		{name: "an editor", set: func(h *testHost) {
			h.files["proc/9/cmdline"] = "vi\x00ip-masq-agent\x00"
		}},

		{"Cilium's interface", func(h *testHost) { h.files["proc/net/dev"] += "cilium_host: 1\ncilium_net: 1\n" },
			map[string]string{"notice ebpf-masquerade": "cilium_host"}},
		{"Calico's data plane", func(h *testHost) { h.files["proc/net/dev"] += "bpfout.cali: 1\n" },
			map[string]string{"problem ebpf-masquerade": "bpfout.cali"}},
		{name: "Calico without it", set: func(h *testHost) {
			h.files["proc/net/dev"] += "cali123: 1\n tunl0: 1\n"
			h.files["sys/fs/bpf/tc/globals/test"] = ""
		}},

		{"no capability", func(h *testHost) { h.files["proc/self/status"] = "CapEff:\t0000000000002000\n" },
			map[string]string{"problem missing-capability": "CAP_NET_ADMIN, CapabilityBoundingSet in a systemd unit (with User= in AmbientCapabilities too)"}},
		{"no raw sockets on iptables-legacy", func(h *testHost) {
			h.choice.Variant, h.files["proc/self/status"] = netfilter.VariantLegacy, "CapEff:\t0000000000001000\n"
		}, map[string]string{"problem missing-capability": "CAP_NET_RAW"}},
		{name: "no raw sockets on iptables-nft", set: func(h *testHost) { h.files["proc/self/status"] = "CapEff:\t0000000000001000\n" }},
		{"capabilities that cannot be read", func(h *testHost) { h.files["proc/self/status"] = "Name: x\n" },
			map[string]string{"notice not-examined": "CapEff"}},

		{"no forwarding", func(h *testHost) { h.files["proc/sys/net/ipv4/ip_forward"] = "0\n" },
			map[string]string{"problem forwarding-off": "net.ipv4.ip_forward is 0"}},
		{"no forwarding of IPv6", func(h *testHost) {
			h.policies[0].EnableIPv6, h.files["proc/sys/net/ipv6/conf/all/forwarding"] = new(true), "0\n"
		}, map[string]string{"problem forwarding-off": "net.ipv6.conf.all.forwarding is 0"}},
		{name: "no forwarding of IPv6, which is not managed", set: func(h *testHost) { h.files["proc/sys/net/ipv6/conf/all/forwarding"] = "0\n" }},

		{"a saved chain", func(h *testHost) { h.files["etc/iptables/rules.v4"] = "*nat\n:IP-MASQ-AGENT - [0:0]\nCOMMIT\n" },
			map[string]string{"notice saved-ruleset": "/etc/iptables/rules.v4 (netfilter-persistent.service, not enabled): contains chain IP-MASQ-AGENT"}},
		{"a saved table that is loaded", func(h *testHost) {
			h.files["etc/sysconfig/iptables"] = "*nat\nCOMMIT\n"
			h.files["etc/systemd/system/basic.target.wants/iptables.service"] = ""
		}, map[string]string{"notice saved-ruleset": "/etc/sysconfig/iptables (iptables.service, enabled): replaces table nat"}},
		{"a saved ruleset that flushes", func(h *testHost) {
			h.choice = netfilter.Choice{Backend: policy.NFTables}
			h.files["etc/nftables.conf"] = "#!/usr/sbin/nft -f\nflush ruleset;\ntable ip x { chain masq-IP-MASQ-AGENT { } }\n"
			h.files["etc/systemd/system/sysinit.target.wants/nftables.service"] = ""
		}, map[string]string{"notice saved-ruleset": "flushes the ruleset, contains chain"}},
		{name: "saved rulesets of no harm", set: func(h *testHost) {
			h.files["etc/nftables.conf"] = "flush ruleset\n"
			h.files["etc/iptables/rules.v4"] = "# IP-MASQ-AGENT\n*nat\n:OTHER-IP-MASQ-AGENT -\nCOMMIT\n"
			h.files["etc/sysconfig/ip6tables"] = "*filter\nCOMMIT\n"
			h.files["etc/systemd/system/basic.target.wants/ip6tables.service"] = ""
		}},
		{"a file that cannot be read", func(h *testHost) {
			delete(h.files, "proc/net/dev")
			h.files["proc/net/dev/directory"] = ""
		}, map[string]string{"notice not-examined": "proc/net/dev: not a regular file"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHost(t)
			tc.set(h)
			compare(t, tc.want, h.examine())
		})
	}
}

// compare holds findings to what is wanted: IDs and severities, all of them, and
// of each words that it says, in any place.
func compare(t *testing.T, want map[string]string, findings []Finding) {
	t.Helper()
	got := map[string]string{}
	for _, f := range findings {
		got[string(f.Severity)+" "+f.ID] = strings.Join(append(f.Details, f.Remedy), "\n")
		if f.Cause == "" || f.Remedy == "" || len(f.Details) == 0 {
			t.Errorf("%+v says too little", f)
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got))); diff != "" || len(got) != len(findings) {
		t.Fatalf("(-want +got):\n%s\n%q", diff, got)
	}
	for id, words := range want {
		assert.Contains(t, id, got[id], strings.Split(words, ", ")...)
	}
}

func TestOrderAndForm(t *testing.T) {
	h := newHost(t)
	h.files["proc/sys/net/ipv4/ip_forward"] = "0\n"
	h.files["proc/9/cmdline"] = "ip-masq-agent\x00"
	h.files["etc/iptables/rules.v4"] = ":IP-MASQ-AGENT - [0:0]\n"
	findings := h.examine()
	var ids []string
	for _, f := range findings {
		ids = append(ids, f.ID)
	}
	assert.Equal(t, "ids", ids, []string{"agent-running", "forwarding-off", "saved-ruleset"})
	text, err := json.Marshal(findings[1])
	want := `{"id":"forwarding-off","severity":"problem","cause":"The kernel does not forward packets, so pods cannot reach other networks.",` +
		`"details":["net.ipv4.ip_forward is 0"],"remedy":"Set the sysctl to 1, in /etc/sysctl.d to make it last. On a node that never had a pod, wait for the first one: most main plugins set it."}`
	if diff := cmp.Diff(want, string(text)); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestOddFiles has files of the host that must neither stop an examination nor
// make it wait.
func TestOddFiles(t *testing.T) {
	h := newHost(t)
	n := h.node()
	assert.NoError(t, os.MkdirAll(filepath.Join(n.Root, "etc/nftables.conf"), 0o755))
	assert.NoError(t, os.MkdirAll(filepath.Join(n.Root, "etc/iptables"), 0o755))
	assert.NoError(t, unix.Mkfifo(filepath.Join(n.Root, "etc/iptables/rules.v4"), 0o644))
	compare(t, map[string]string{"notice not-examined": "nftables.conf: not a regular file, rules.v4: not a regular file"},
		Examine(n))
}

// TestNothingIsKnown examines a node of which nothing was read before.
func TestNothingIsKnown(t *testing.T) {
	isolate(t)
	n := Host{Root: newHost(t).node().Root, Rules: &enforce.State{}, Warnings: func(string) []error { return nil }}
	compare(t, map[string]string{"notice conflist-absent": "has no conflist"}, Examine(n))
}

// calico is a main plugin that gives /32 addresses and states no subnet.
const calico = `{"type": "calico", "ipam": {"type": "calico-ipam"}}`

// onRecord returns pods of the network with an address each.
func onRecord(texts ...string) (pods []store.Pod) {
	for _, a := range addresses(texts...) {
		pods = append(pods, store.Pod{Attachment: store.Attachment{Network: "pods"}, Addresses: []netip.Addr{a}})
	}
	return pods
}

func addresses(texts ...string) (all []netip.Addr) {
	for _, text := range texts {
		all = append(all, netip.MustParseAddr(text))
	}
	return all
}
