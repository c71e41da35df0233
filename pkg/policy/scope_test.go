// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Guards count, drop and bind, and the judge calls stale, no packet that Decide leaves alone, whatever rules match:
// they know less of a packet than the rules, or know it later.
func TestNothingActsOnPacketsLeftAlone(t *testing.T) {
	acted := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) ([]policy.Source, []policy.Policy) {
			sources := genSources().Draw(t, name)
			for i := range sources {
				s := &sources[i].Policy
				s.Chain = rapid.SampledFrom([]string{"A", "A", "B"}).Draw(t, "chain")
				s.Guard, s.StaleConnections = policy.GuardDrop, policy.ResetConnections
			}
			return sources, merge(sources)
		}
		sources, now := draw("now")
		_, before := draw("before")
		guards := policy.DesiredGuards(now, policy.Owner{})
		judge := policy.NewConnectionJudge(now, [][]policy.Policy{before}, rapid.Bool().Draw(t, "untranslated"))
		for range 20 {
			pkt := genPacket(sources).Draw(t, "packet")
			if policy.FamilyOf(pkt.Src) != policy.FamilyOf(pkt.Dst) {
				continue
			}
			masquerades := func(p policy.Policy) bool { return p.Decide(pkt).Action == policy.ActionMasquerade }
			for _, g := range guards {
				in := g.Family == policy.FamilyOf(pkt.Dst) && g.Scope.Contains(pkt)
				own := now[slices.IndexFunc(now, func(p policy.Policy) bool { return p.Chain == g.Chain })]
				if in && !g.Exempt.Contains(pkt.Dst) {
					if acted["guarded"]++; !masquerades(own) {
						t.Fatalf("%+v: the guard %+v catches it, but %s", pkt, g, own.Decide(pkt).Reason)
					}
				}
				if g.Family == policy.FamilyOf(pkt.Dst) && g.Binds(pkt) {
					if acted["bound"]++; slices.ContainsFunc(now, masquerades) {
						t.Fatalf("%+v: the guard %+v binds it, but a policy masquerades it", pkt, g)
					}
				}
			}
			c := policy.Connection{Src: pkt.Src, Dst: pkt.Dst, ReplySrc: pkt.Dst, ReplyDst: pkt.Src}
			translated := rapid.Bool().Draw(t, "translated")
			if translated {
				c.ReplyDst = lowAddress(policy.FamilyOf(pkt.Src), 9)
			}
			routes := &nodeRoutes{out: pkt.Out}
			if pkt.SrcLocal {
				routes.local = append(routes.local, pkt.Src)
			}
			if pkt.DstLocal {
				routes.local = append(routes.local, pkt.Dst)
			}
			if _, stale := judge.Judge(&c, routes); stale && c.ReplyDst != c.Src {
				if acted["stale, translated"]++; slices.ContainsFunc(now, masquerades) {
					t.Fatalf("%+v: translated and stale, but a policy masquerades it", pkt)
				}
			} else if stale {
				if acted["stale"]++; !slices.ContainsFunc(now, masquerades) {
					t.Fatalf("%+v: not translated and stale, but no policy masquerades it", pkt)
				}
			}
		}
	})
	for _, action := range []string{"guarded", "bound", "stale", "stale, translated"} {
		if acted[action] < 5 {
			t.Errorf("%s: %d of the random packets", action, acted[action])
		}
	}
}

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
