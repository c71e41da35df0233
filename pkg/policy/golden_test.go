// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Each directory of testdata with a sources.json is a case: the sources, and the
// policies and rulesets computed from them, in ruleset.txt. -update writes that file.
func TestGolden(t *testing.T) {
	cases, err := filepath.Glob(filepath.Join("testdata", "*", "sources.json"))
	if err != nil || len(cases) == 0 {
		t.Fatalf("no cases in testdata: %v", err)
	}
	for _, file := range cases {
		dir := filepath.Dir(file)
		t.Run(filepath.Base(dir), func(t *testing.T) {
			got := explain(policy.Merge(readSources(t, file)))
			golden.Check(t, filepath.Join(dir, "ruleset.txt"), got)
		})
	}
}

func readSources(t *testing.T, file string) []policy.Source {
	t.Helper()
	text := assert.Must(os.ReadFile(file))(t)
	var sources []policy.Source
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&sources); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var errs []error
	for _, c := range sources {
		errs = append(errs, c.Policy.Validate(policy.DefaultCIDRLimit))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return sources
}

// explain writes a policy and what follows from it, for people to review.
func explain(merged []policy.Policy) string {
	var b strings.Builder
	for _, p := range merged {
		fmt.Fprintf(&b, "policy %s\n", p.Chain)
		list(&b, "  conflict   ", p.Conflicts, func(e *policy.ConflictError) string { return e.Error() })
		entry := func(e policy.PrefixAction) string {
			return fmt.Sprintf("%-18s %-10s %v", e.Prefix, e.Action, originsOf(e))
		}
		list(&b, "  destination", p.Destinations, entry)
		list(&b, "  source     ", p.ExemptSources, entry)
	}
	for _, form := range []struct {
		title  string
		layout policy.Layout
	}{{"a rule for each prefix", policy.Layout{}}, {"sets", policy.Layout{Sets: true}}} {
		fmt.Fprintf(&b, "\n== %s\n%s", form.title, render(policy.Desired(merged, form.layout, policy.OwnedBy("/var/lib/cni/ip-masq"))))
	}
	if guards := policy.DesiredGuards(merged, policy.OwnedBy("/var/lib/cni/ip-masq")); len(guards) > 0 {
		b.WriteString("\n== guards\n")
		list(&b, "guard", guards, func(g policy.Guard) string {
			return fmt.Sprintf("%s %s %s, %q\n  out    %v\n  pods   %v\n  exempt %v\n  bound  %v, unless mark %v",
				g.Family, g.Chain, g.Mode, g.Owner.Comment(), g.Scope.Interfaces, g.Scope.Sources, g.Exempt, g.Bound, g.BypassMark)
		})
	}
	return b.String()
}

func list[T any](b *strings.Builder, title string, items []T, text func(T) string) {
	for _, item := range items {
		fmt.Fprintf(b, "%s %s\n", title, text(item))
	}
}

// render writes a ruleset for people. A share is followed by its exact number.
func render(rs policy.Ruleset) string {
	var b strings.Builder
	for _, c := range rs.Chains {
		fmt.Fprintf(&b, "chain %s %s, %q\n", c.Family, c.Name, c.Owner.Comment())
		for _, r := range append(append([]policy.Rule{}, c.Jumps...), c.Rules...) {
			fmt.Fprintf(&b, "  %s", r)
			if r.Probability != 0 {
				fmt.Fprintf(&b, "   (%d of 2^31: %.11f)", r.Probability, float64(r.Probability)/policy.ProbabilityScale)
			}
			b.WriteByte('\n')
			if strings.Contains(r.String(), " more}") {
				list(&b, "    in full:", slices.Concat(r.From, r.To), func(x netipx.IPRange) string { return policy.Ranges{x}.String() })
			}
		}
	}
	return b.String()
}
