// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestNamespacesAreBounded: a source can name 256 namespaces, and so can all sources of a chain together.
func TestNamespacesAreBounded(t *testing.T) {
	named := func(from, to int) policy.SourcePolicy {
		s := policy.SourcePolicy{Chain: policy.DefaultChain}
		for i := from; i < to; i++ {
			s.NonMasqueradeNamespaces = append(s.NonMasqueradeNamespaces, fmt.Sprint("n", i))
		}
		return s
	}
	for count, valid := range map[int]bool{policy.MaxNamespaces: true, policy.MaxNamespaces + 1: false} {
		var field *policy.FieldError
		err := named(0, count).Validate(policy.DefaultCIDRLimit)
		if (err == nil) != valid || err != nil && (!errors.As(err, &field) || field.Key != "nonMasqueradeNamespaces") {
			t.Errorf("%d in one source: %v", count, err)
		}
		merged := mergeOne(t, network("a", 1, named(0, 200)), network("b", 2, named(100, count)))
		var bound *policy.BoundError
		if err := merged.CheckBounds(policy.Layout{Sets: true}); (err == nil) != valid || err != nil && !errors.As(err, &bound) {
			t.Errorf("%d in two sources: %v", count, err)
		}
	}
}
