// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// agentText writes lists as a file, with unknown keys and comments between.
func agentText(t *rapid.T, lists map[string][]string) string {
	var b strings.Builder
	b.WriteString("enableIPv6: true\ncidrLimit: 1000\n")
	for _, key := range []string{"nonMasqueradeCIDRs", "masqueradeCIDRs", "outputInterfaces"} {
		items, stated := lists[key]
		if !stated {
			continue
		}
		if rapid.Bool().Draw(t, "other letters") {
			key = strings.ToLower(key)
		}
		if rapid.Bool().Draw(t, "flow") {
			fmt.Fprintf(&b, "%s: [%s]\n", key, `"`+strings.Join(items, `", "`)+`"`)
			continue
		}
		fmt.Fprintf(&b, "%s:\n", key)
		for _, item := range items {
			fmt.Fprintf(&b, "- %s # x\n", item)
		}
	}
	return b.String()
}

// What files state together does not depend on how a list is spread over them,
// and every place is that of the value that is written there.
func TestUnitingFiles(t *testing.T) {
	dir := t.TempDir()
	read := func(t *rapid.T, texts ...string) Files {
		old, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range old {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
		for i, text := range texts {
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("ip-masq-%d", i)), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		files, err := Read(dir, config.DialectV1, config.AgentPolicy{})
		if err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(texts, "\n"))
		}
		return files
	}
	rapid.Check(t, func(rt *rapid.T) {
		// Two prefixes of a kind in each list, so that some come again.
		exempt := rapid.SliceOfN(rapid.SampledFrom([]string{"10.0.0.0/8", "10.1.0.0/16", "fd00::/8", "172.16.0.0/12"}), 1, 12).Draw(rt, "exempt")
		masqueraded := rapid.SliceOfN(rapid.SampledFrom([]string{"10.2.0.0/16", "fd01::/16"}), 1, 4).Draw(rt, "masqueraded")
		names := rapid.SliceOfN(rapid.SampledFrom([]string{"eth0", "wg+", "x"}), 1, 6).Draw(rt, "names")
		whole := map[string][]string{"nonMasqueradeCIDRs": exempt, "masqueradeCIDRs": masqueraded, "outputInterfaces": names}
		var parts [2]map[string][]string
		parts[0], parts[1] = map[string][]string{}, map[string][]string{}
		for key, items := range whole {
			at := rapid.IntRange(0, len(items)).Draw(rt, "split of "+key)
			for i, part := range [][]string{items[:at], items[at:]} {
				if len(part) > 0 {
					parts[i][key] = part
				}
			}
		}
		one := read(rt, agentText(rt, whole))
		two := read(rt, agentText(rt, parts[0]), agentText(rt, parts[1]))
		a, b := policy.Merge([]policy.Source{one.Source})[0], policy.Merge([]policy.Source{two.Source})[0]
		var of [2][]string
		for i, p := range []policy.Policy{a, b} {
			for _, e := range p.Destinations {
				of[i] = append(of[i], fmt.Sprint(e.Prefix, e.Action))
			}
			of[i] = append(of[i], p.Interfaces.Value...)
		}
		slices.Sort(of[0]) // the lists of a file come one after the other
		slices.Sort(of[1])
		if diff := cmp.Diff(of[0], of[1]); diff != "" {
			rt.Errorf("one file (-) and two (+):\n%s", diff)
		}
		checkOrigins(rt, b, parts[:])
	})
}

// checkOrigins checks that each origin names a file, and the item by its place among the
// different ones of the list there.
func checkOrigins(t *rapid.T, p policy.Policy, files []map[string][]string) {
	for _, e := range p.Destinations {
		for _, o := range e.Origins {
			if o.Source.Kind == policy.BuiltIn {
				continue
			}
			var nth int
			if _, err := fmt.Sscanf(filepath.Base(o.File), "ip-masq-%d", &nth); err != nil {
				t.Fatalf("%s comes from %+v", e.Prefix, o)
			}
			var different []string
			for _, item := range files[nth][o.Key] {
				if !slices.Contains(different, item) {
					different = append(different, item)
				}
			}
			if different[o.Index] != e.Prefix.String() {
				t.Errorf("%s comes from %+v, which is %s", e.Prefix, o, different[o.Index])
			}
		}
	}
}

// A policy that is written to a file and read again is the same.
func TestPolicySurvivesAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ip-masq-agent")
	rapid.Check(t, func(rt *rapid.T) {
		want := policytest.Any().SourcePolicy(rt)
		text, err := yaml.Marshal(want)
		if err != nil {
			rt.Fatal(err)
		}
		if err := os.WriteFile(path, append(text, "cidrLimit: 1000\n"...), 0o644); err != nil {
			rt.Fatal(err)
		}
		got, err := Read(filepath.Dir(path), config.DialectV1, config.AgentPolicy{})
		if err != nil {
			rt.Fatalf("%v\n%s", err, text)
		}
		if diff := cmp.Diff(want, got.Source.Policies()[0], comparePrefixes); diff != "" {
			rt.Errorf("(-want +got):\n%s\n%s", diff, text)
		}
	})
}
