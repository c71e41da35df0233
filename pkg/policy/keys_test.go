// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestKeysInJSON: the table has every field. What a source leaves out stays left out in a stored document, and an empty list stays an
// empty list: only the latter says that there are none.
func TestKeysInJSON(t *testing.T) {
	assert.Equal(t, "fields of SourcePolicy and keys of the table", reflect.TypeFor[policy.SourcePolicy]().NumField(), len(policytest.Keys()))
	nothing := policy.SourcePolicy{Chain: "C"}
	text, err := json.Marshal(nothing)
	if err != nil || string(text) != `{"masqChain":"C"}` {
		t.Errorf("nothing stated: %s, %v", text, err)
	}
	for _, k := range policytest.Keys() {
		others := []policy.SourcePolicy{nothing}
		for _, value := range policytest.Samples(t, k) {
			s := policytest.Stating(t, fmt.Sprintf("%q:%s", k.Name, value))
			text, err := json.Marshal(s)
			want := fmt.Sprintf(`{"masqChain":"C",%q:%s}`, k.Name, value)
			if k.Name == "masqChain" {
				want = fmt.Sprintf(`{"masqChain":%s}`, value)
			}
			if err != nil || string(text) != want {
				t.Errorf("JSON %s, want %s (%v)", text, want, err)
			}
			if !s.Equal(policytest.Stating(t, string(text[1:len(text)-1]))) {
				t.Errorf("%s is not equal to itself", text)
			}
			for _, other := range others {
				if s.Equal(other) || other.Equal(s) {
					t.Errorf("%s equals %+v", text, other)
				}
			}
			others = append(others, s)
		}
	}
}

// valuesOnly compares policies without regard to where their values come from.
func valuesOnly() cmp.Options {
	return cmp.Options{cmpopts.EquateEmpty(), cmpopts.IgnoreFields(policy.Policy{}, "Conflicts"),
		cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Origins" }, cmp.Ignore())}
}

// TestKeysOfSources: what a source leaves out agrees with everything. Of values that must agree, that of the
// first source is in force.
func TestKeysOfSources(t *testing.T) {
	for _, k := range policytest.Keys() {
		if k.Name == "masqChain" {
			continue
		}
		samples := policytest.Samples(t, k)
		for i, value := range samples {
			first := policytest.Stating(t, fmt.Sprintf("%q:%s", k.Name, value))
			other := policytest.Stating(t, fmt.Sprintf("%q:%s", k.Name, samples[1-i]))
			alone := mergeOne(t, network("a", 1, first))
			if cmp.Equal(alone, mergeOne(t, network("a", 1, other)), valuesOnly(), equatable) {
				t.Errorf("%s %s: its value does not matter", k.Name, value)
			}
			for name, second := range map[string]policy.Source{
				"left out": agentFiles(policy.SourcePolicy{Chain: "C"}), "the same": network("b", 2, first), "another": network("b", 2, other),
			} {
				p := mergeOne(t, second, network("a", 1, first))
				conflicts := 0
				if name == "another" && k.Sources == "must agree" {
					conflicts = 1
				}
				assert.Equal(t, fmt.Sprintf("%s %s, %s: conflicts", k.Name, value, name), len(p.Conflicts), conflicts)
				if conflicts > 0 && p.Conflicts[0].Superseded.Key != k.Name {
					t.Errorf("%s %s, %s: conflict %v", k.Name, value, name, p.Conflicts[0])
				}
				if name == "another" && k.Sources != "must agree" {
					continue
				}
				assert.Equal(t, fmt.Sprintf("%s %s, %s: not in force", k.Name, value, name), p, alone, valuesOnly())
			}
		}
	}
}

// TestOriginsOfKeys: the values of a policy name the sources that state them.
func TestOriginsOfKeys(t *testing.T) {
	// The value of each key, and its origins.
	stated := func(p policy.Policy) map[string]string {
		out := map[string]string{}
		for _, field := range reflect.ValueOf(p).Fields() {
			if field.Kind() != reflect.Struct {
				continue
			}
			text, origins := fmt.Sprint(field.FieldByName("Value")), field.FieldByName("Origins").Interface().([]policy.Origin)
			for _, o := range origins {
				text += " " + o.Source.String()
			}
			if len(origins) > 0 {
				out[origins[0].Key] = text
			}
		}
		return out
	}
	defaults, all := stated(mergeOne(t, agentFiles(policy.SourcePolicy{}))), policytest.Stating(t, strings.Join(policytest.Every(t, `"`, ":"), ","))
	agents, three := stated(mergeOne(t, agentFiles(all))), stated(mergeOne(t, network("a", 2, all), network("b", 1, all), agentFiles(all)))
	for _, k := range policytest.Keys() {
		if k.Sources != "must agree" && k.Sources != "`true` wins" {
			continue
		}
		if words := strings.Fields(k.Default); len(words) == 1 && !slices.Contains([]string{"any", "none"}, words[0]) && defaults[k.Name] != k.Default+" built in" {
			t.Errorf("%s: default %s, and its row has %s", k.Name, defaults[k.Name], k.Default)
		}
		if want := " the agent files"; !strings.HasSuffix(agents[k.Name], want) {
			t.Errorf("%s: %s, want %s", k.Name, agents[k.Name], want)
		}
		if want := ` network "b" network "a" the agent files`; !strings.HasSuffix(three[k.Name], want) {
			t.Errorf("%s: %s, want %s", k.Name, three[k.Name], want)
		}
	}
}

// TestBadWords: a document that no version wrote is refused.
func TestBadWords(t *testing.T) {
	for _, k := range policytest.Keys() {
		if word, is := k.Field.(policy.Word); is {
			err := policytest.Stating(t, fmt.Sprintf(`%q: "other"`, k.Name)).Validate(1)
			wantError(t, k.Name, err, k.Name+": other is not one of the choices; write "+policy.JoinOr(word.Choices()))
		}
	}
}
