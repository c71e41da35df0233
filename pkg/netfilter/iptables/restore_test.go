// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var prefixList = policytest.Prefixes

func entriesOf(a policy.Action, list ...string) []policy.PrefixAction {
	var out []policy.PrefixAction
	for _, p := range prefixList(list...) {
		out = append(out, policy.PrefixAction{Prefix: p, Action: a})
	}
	return out
}

// basic is what a node has that configures nothing but IPv6.
func basic(chain string) policy.Policy {
	return policy.Policy{
		Chain: chain,
		Destinations: entriesOf(policy.ActionExempt, "169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",
			"fe80::/10", "fd00::/8"),
		Host:        policy.WithOrigins[bool]{Value: true},
		EnableIPv6:  policy.WithOrigins[bool]{Value: true},
		RandomFully: policy.WithOrigins[bool]{Value: true},
	}
}

func desired(o policy.Owner, policies ...policy.Policy) policy.Ruleset {
	return policy.Desired(policies, policy.Layout{}, o)
}

func TestRender(t *testing.T) {
	scoped := basic("PODS")
	scoped.Sources.Value = prefixList("10.1.0.0/16", "10.2.0.0/17", "fd01::/64")
	scoped.Interfaces.Value = []string{"eth0", "wlan+", "a-b@c'd"}
	scoped.Host.Value = false
	scoped.ExemptSources = entriesOf(policy.ActionExempt, "10.1.7.0/24")
	ports := basic("PORTS")
	ports.ToPorts.Value = policy.Ports{{First: 1024, Last: 29999}, {First: 32768, Last: 65535}, {First: 7, Last: 7}}
	ports.Destinations = append(entriesOf(policy.ActionMasquerade, "10.3.0.0/16"), ports.Destinations...)
	outputs := ports
	outputs.ToPorts.Value = ports.ToPorts.Value[:1]
	outputs.Outputs = []policy.OutputAddress{
		{Interface: "eth0", Address: netip.MustParseAddr("192.0.2.1")}, {Address: netip.MustParseAddr("192.0.2.9")},
		{Interface: "a-b@c'd", Address: netip.MustParseAddr("2001:db8::1")},
	}
	plainOutputs := basic("PLAIN")
	plainOutputs.Outputs, plainOutputs.RandomFully.Value = outputs.Outputs, false
	only := basic("ONLY")
	only.RandomFully.Value = false
	only.Destinations = append(entriesOf(policy.ActionExempt, "0.0.0.0/0", "::/0"), entriesOf(policy.ActionMasquerade, "8.8.8.8/32", "2001:db8::1/128")...)
	for name, rs := range map[string]policy.Ruleset{
		"basic":   desired(policy.OwnedBy("/var/lib/cni/ip-masq"), basic("IP-MASQ-AGENT")),
		"scoped":  desired(policy.OwnedBy("/var/lib/cni/ip-masq"), scoped),
		"ports":   desired(policy.OwnedBy("/mnt/a+b@c"), ports),
		"outputs": desired(policy.OwnedBy("/mnt/a+b@c"), outputs, plainOutputs),
		"only":    desired(policy.Owner{}, only),
		"two":     desired(policy.OwnedBy("/var/lib/cni/ip-masq"), basic("ONE"), basic("TWO")),
	} {
		for _, f := range policy.Families() {
			file := filepath.Join("testdata", "render", name+"."+string(f))
			got := Render(rs, f)
			golden.Check(t, file, got)
		}
	}
}
