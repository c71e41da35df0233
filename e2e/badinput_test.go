// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// invalidKey is an invalid value of a key, and what the error must contain.
type invalidKey struct {
	key   string
	value any // marshaled to JSON
	msgs  []string
}

func raw(s string) json.RawMessage { return json.RawMessage(s) }

// invalidKeys has values of each type of key. Tests of package config have the messages.
func invalidKeys() []invalidKey {
	keys := []invalidKey{
		{"nonMasqueradeCidrs", []string{}, []string{`nonMasqueradeCidrs: is not a known key; did you mean nonMasqueradeCIDRs?`}},
		{strings.Repeat("k", 5000), 1, []string{`…": is not a known key; remove it`}},
		{"requireAgentConfig", "False", []string{`requireAgentConfig: "False" is a string; write true or false`}},
		{"cidrLimit", 1000001, []string{`cidrLimit: 1000001 is not a whole number from 1 to 1000000`}},
		{"masqChain", "A\n-F", []string{`masqChain: "A\n-F" may hold only letters, digits`}},
		{"dataDir", "etc", []string{`dataDir: etc is relative`}},
		{"name", "../x", []string{"invalid characters found in network name"}}, // refused by the CNI library
	}
	for _, k := range policytest.Keys() {
		var values []any
		switch k.Field.(type) {
		case **bool:
			values = []any{"true", 1, object{}}
		case *[]netip.Prefix, *policy.AddressItems:
			values = []any{[]string{"10.0.1.24/24"}, []string{"fd00::/8"}, []string{"10.5.0.0/16", ""}, raw(`["10.5.0.0/16", null]`), raw(`[10]`), "10.0.0.0/8"}
		case *[]string:
			values = []any{[]string{"eth0", "+"}, []string{"a -j ACCEPT"}, []string{"sixteen-letters-"}, []string{""}}
		case *policy.Namespaces:
			values = []any{[]string{"prod", "Prod"}, []string{"a.b"}, []string{"-a"}, []string{"prod-*"}, []string{""}, "prod"}
		case **policy.Ports:
			values = []any{"0-100", "1-100,50-200", "1024,", 8080}
		default:
			values = []any{"no value", 24576, []string{}}
		}
		for _, value := range append(values, raw("null")) {
			keys = append(keys, invalidKey{k.Name, value, []string{k.Name}})
		}
	}
	return keys
}

// TestBadInput checks that each invalid key gives error 7 with key, item, value and remedy, and
// that neither the rules nor the state change.
func TestBadInput(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	fresh := n.snapshot(t)
	bad := n.conf(t, "podnet", object{"masqueradeCIDRs": []string{"10.0.0.1/8"}, "enableIPv6": true})
	n.invoke(t, invocation{verb: "ADD", conf: bad}).want(t, 7)
	n.unchanged(t, fresh) // not even a dataDir
	n.addAndCheck(t, n.conf(t, "podnet", nil))
	before, generation := n.snapshot(t), n.generation(t)
	for i, m := range invalidKeys() {
		t.Run(fmt.Sprint(i, " ", m.key[:min(len(m.key), 30)]), func(t *testing.T) {
			a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{m.key: m.value}), id: "newcomer"})
			a.want(t, 7, m.msgs...)
			if strings.Contains(a.msg, "\n") || len(a.msg) > 1024 {
				t.Errorf("message has several lines or more than 1024 bytes:\n%s", a.msg)
			}
			if state := tree(t, n.dataDir); state != before.state || n.generation(t) != generation {
				n.unchanged(t, before)
			}
		})
	}
	n.unchanged(t, before)
}

// TestProtocolKeys checks that the plugin accepts the keys that the CNI protocol and runtimes add.
func TestProtocolKeys(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := n.conf(t, "podnet", object{
		"runtimeConfig": object{"portMappings": []int{}}, "capabilities": object{"bandwidth": true}, "args": object{"cni": object{}},
		"ipam": object{"type": "host-local"}, "dns": object{}, "ipMasq": false, "cni.dev/valid-attachments": nil, "cni.dev/anything": 1,
	})
	n.addAndCheck(t, conf).noWarnings(t)
}
