// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func anySource(t *rapid.T) policy.Source {
	c := policy.Source{
		ID:         policy.SourceID{Kind: policy.AgentFiles},
		Policy:     policytest.Any().SourcePolicy(t),
		Superseded: rapid.Bool().Draw(t, "superseded"),
		Order:      rapid.Int64().Draw(t, "order"),
	}
	if rapid.Bool().Draw(t, "network") {
		c.ID = network(rapid.StringN(1, 50, -1).Draw(t, "name"))
	}
	return c
}

func TestAnySourceIsLoadedAsItWasStored(t *testing.T) {
	top, n := t.TempDir(), 0
	rapid.Check(t, func(rt *rapid.T) {
		want := map[policy.SourceID]policy.Source{}
		n++
		d := store.Open(filepath.Join(top, fmt.Sprint(n))).WithBoot(boot)
		l := assert.Must(d.Lock(t.Context()))(t)
		defer func() { ok(t, l.Release()) }()
		for range rapid.IntRange(1, 3).Draw(rt, "sources") {
			c := anySource(rt)
			want[c.ID] = c
			assert.NoError(rt, l.Put(c))
		}
		s := load(t, d)
		if len(s.Sources) != len(want) || len(s.Unreadable) > 0 {
			rt.Fatalf("%+v", s)
		}
		for _, c := range s.Sources {
			if !reflect.DeepEqual(c, want[c.ID]) {
				rt.Fatalf("stored %+v, loaded %+v", want[c.ID], c)
			}
		}
		if !slices.IsSortedFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) }) {
			rt.Fatalf("not sorted: %+v", s.Sources)
		}
	})
}
