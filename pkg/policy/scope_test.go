// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestReasonsOutOfScope: a packet that is out of scope by a key is not so by that key if no source has it.
func TestReasonsOutOfScope(t *testing.T) {
	keys := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		for range 20 {
			pkt := genPacket(sources).Draw(t, "packet")
			d := merge(sources)[0].Decide(pkt)
			if d.Action != policy.ActionOutOfScope || pkt.DstLocal || policy.FamilyOf(pkt.Src) != policy.FamilyOf(pkt.Dst) {
				continue
			}
			if len(d.Origins) == 0 {
				t.Fatalf("%+v is out of scope by no key: %s", pkt, d.Reason)
			}
			key, without := d.Origins[0].Key, slices.Clone(sources)
			keys[key]++
			for i := range without {
				for _, k := range policy.Keys(&without[i].Policy) {
					if k.Name == key {
						reflect.ValueOf(k.Field).Elem().SetZero()
					}
				}
				if key == "enableIPv6" {
					without[i].Policy.EnableIPv6 = ptr(true)
				}
			}
			again := merge(without)[0].Decide(pkt)
			if again.Action == policy.ActionOutOfScope && again.Origins[0].Key == key {
				t.Fatalf("%+v is out of scope (%s), also without the key", pkt, d.Reason)
			}
		}
	})
	for _, key := range []string{"sourceCIDRs", "outputInterfaces", "masqueradeHost", "enableIPv6"} {
		if keys[key] == 0 {
			t.Errorf("no random packet is out of scope by %s", key)
		}
	}
}
