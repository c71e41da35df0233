// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestRuleString: whatever a rule matches is in its text.
func TestRuleString(t *testing.T) {
	values := map[reflect.Kind]any{reflect.String: "tcp", reflect.Bool: true, reflect.Uint32: uint32(7)}
	for i := range reflect.TypeFor[policy.Match]().NumField() {
		r := policy.Rule{Verdict: policy.Return}
		for parts := []reflect.Value{reflect.ValueOf(&r.Match).Elem().Field(i)}; len(parts) > 0; parts = parts[1:] {
			v := parts[0]
			if v.Kind() != reflect.Struct {
				v.Set(reflect.ValueOf(values[v.Kind()]).Convert(v.Type()))
				continue
			}
			for j := range v.NumField() {
				parts = append(parts, v.Field(j))
			}
		}
		if text := r.String(); text == "return" {
			t.Errorf("%+v is written %q", r.Match, text)
		}
	}
}

// differing are rules of which no two are equal: each is the first with one
// field changed, or an odd one that another could be taken for.
func differing() []policy.Rule {
	return []policy.Rule{
		{Verdict: policy.Return},
		{Verdict: policy.Masquerade},
		{Verdict: policy.Jump},
		{Verdict: policy.Return, From: ranges("10.0.0.0/8")},
		{Verdict: policy.Return, From: policy.Ranges{}},
		{Verdict: policy.Return, From: ranges("10.0.0.0/9", "10.192.0.0/10")},
		{Verdict: policy.Return, To: ranges("10.0.0.0/8")},
		{Verdict: policy.Return, To: policy.Ranges{}},
		{Verdict: policy.Return, To: ranges("10.0.0.0/8", "192.168.0.0/16")},
		{Verdict: policy.Return, To: ranges("0.0.0.0/0")},
		{Verdict: policy.Return, Match: policy.Match{Out: "eth0"}},
		{Verdict: policy.Return, Match: policy.Match{Out: "eth0", NotFromLocal: true}},
		{Verdict: policy.Masquerade, Ports: policy.PortRange{First: 1, Last: 2}},
		{Verdict: policy.Masquerade, Ports: policy.PortRange{First: 1, Last: 3}},
		{Verdict: policy.Masquerade, RandomFully: true},
		{Verdict: policy.Masquerade, Address: netip.MustParseAddr("192.0.2.1")},
		{Verdict: policy.Masquerade, Address: netip.MustParseAddr("192.0.2.2")},
	}
}

func TestNotOfAgents(t *testing.T) {
	masquerade := policy.Rule{Verdict: policy.Masquerade}
	ports := policy.Rule{Verdict: policy.Masquerade, Ports: policy.PortRange{First: 1, Last: 2}, Match: policy.Match{Protocol: "udp", Probability: 7}}
	destination := policy.Rule{Verdict: policy.Return, To: ranges("10.0.0.0/8"), Match: policy.Match{NotToLocal: true}}
	matching := func(m policy.Match) policy.Rule { return policy.Rule{Verdict: policy.Return, Match: m} }
	for name, tt := range map[string]struct {
		rules []policy.Rule
		want  []int
	}{
		"an agent's":        {rules: []policy.Rule{{Verdict: policy.Return}, destination, ports, masquerade}},
		"none":              {},
		"unrecognized":      {rules: []policy.Rule{masquerade, {Verdict: policy.Unrecognized}}, want: []int{1}},
		"jump":              {rules: []policy.Rule{{Verdict: policy.Jump}, masquerade}, want: []int{0}},
		"snat":              {rules: []policy.Rule{{Verdict: policy.Masquerade, Address: netip.MustParseAddr("192.0.2.1")}}, want: []int{0}},
		"source":            {rules: []policy.Rule{{Verdict: policy.Return, From: ranges("10.0.0.0/8")}, masquerade}, want: []int{0}},
		"interface":         {rules: []policy.Rule{matching(policy.Match{Out: "wg0"}), masquerade}, want: []int{0}},
		"type of source":    {rules: []policy.Rule{masquerade, matching(policy.Match{NotFromLocal: true})}, want: []int{1}},
		"protocol":          {rules: []policy.Rule{matching(policy.Match{Protocol: "tcp"})}, want: []int{0}},
		"protocol, no port": {rules: []policy.Rule{{Verdict: policy.Masquerade, Match: policy.Match{Protocol: "tcp"}}}, want: []int{0}},
		"at random":         {rules: []policy.Rule{matching(policy.Match{Probability: 7}), matching(policy.Match{Out: "a"})}, want: []int{0, 1}},
	} {
		c := policy.Chain{Rules: tt.rules, Jumps: []policy.Rule{{Verdict: policy.Unrecognized}}}
		assert.Equal(t, name, c.NotOfAgents(), tt.want)
	}
}

// A comment has an owner or none, and what was read is written so that it
// reads the same.
func FuzzParseOwner(f *testing.F) {
	for _, s := range []string{
		"", "ip-masq/1 keeps its state in /state", "ip-masq/1 keeps its state in ", "ip-masq/1", "ip-masq/+1 keeps its state in x",
		"ip-masq/1 keeps its state in a keeps its state in b", "ip-masq/01 keeps its state in \x00",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		o := policy.ParseOwner(comment)
		assert.Equal(t, fmt.Sprintf("owner of %q, read back", comment), policy.ParseOwner(o.Comment()), o)
		if o != (policy.Owner{}) && (o.Schema < 1 || !strings.HasPrefix(comment, "ip-masq/") || !strings.HasSuffix(comment, o.DataDir)) {
			t.Errorf("ParseOwner(%q) = %+v", comment, o)
		}
	})
}
