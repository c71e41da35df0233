// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const podAddress = "10.88.0.5"

// pod returns the record of a pod that has podAddress.
func pod(container, namespace string, at int64, cached bool) store.Pod {
	return store.Pod{Attachment: store.Attachment{ContainerID: container}, Namespace: namespace, At: at, Cached: cached, Addresses: []netip.Addr{netip.MustParseAddr(podAddress)}}
}

// exempt returns its exemption.
func exempt(container, namespace string, at int64, cached bool) store.ExemptPod {
	p := pod(container, namespace, at, cached)
	return store.ExemptPod{ExemptPod: policy.ExemptPod{Address: p.Addresses[0], Namespace: namespace}, Attachment: p.Attachment, At: at, Cached: cached}
}

// TestOwners: which of two attachments with one address has it, in either order.
func TestOwners(t *testing.T) {
	for name, c := range map[string]struct {
		winner, loser store.Pod
		exempt, moved bool
	}{
		"the newer one":              {pod("a", "prod", 2, false), pod("b", "prod", 1, false), true, false},
		"from another namespace":     {pod("a", "prod", 2, false), pod("b", "dev", 1, false), true, true},
		"for another namespace":      {pod("a", "dev", 2, false), pod("b", "prod", 1, false), false, true},
		"an ADD, not the cache":      {pod("a", "prod", 1, false), pod("b", "dev", 2, true), true, true},
		"a newer ADD than the cache": {pod("a", "prod", 2, false), pod("b", "prod", 1, true), true, false},
		"the newer one of the cache": {pod("a", "prod", 2, true), pod("b", "prod", 1, true), true, false},
	} {
		other := exempt(c.loser.ContainerID, c.loser.Namespace, c.loser.At, c.loser.Cached)
		for _, x := range []exemption{
			owners([]string{"prod"}, nil, []store.Pod{c.winner, c.loser}), owners([]string{"prod"}, nil, []store.Pod{c.loser, c.winner}),
			owners([]string{"prod"}, []store.ExemptPod{other}, []store.Pod{c.winner}),
		} {
			if len(x.Pods) > 0 != c.exempt || c.exempt && x.Pods[0].Attachment != c.winner.Attachment {
				t.Errorf("%s: exempt are %v", name, x.Pods)
			}
			if taken := map[store.Attachment][]netip.Addr{c.loser.Attachment: c.loser.Addresses}; !reflect.DeepEqual(x.taken, taken) || len(x.moved) > 0 != c.moved {
				t.Errorf("%s: taken %v, moved %v", name, x.taken, x.moved)
			}
		}
	}
	twice := pod("a", "prod", 1, false)
	twice.Addresses = append(twice.Addresses, twice.Addresses...)
	if x := owners([]string{"prod"}, nil, []store.Pod{twice}); len(x.Pods) != 1 || len(x.taken) > 0 {
		t.Errorf("an address twice: exempt are %v, taken %v", x.Pods, x.taken)
	}
}

// TestPassed: whose connections end, as their address passes to a pod with another verdict.
func TestPassed(t *testing.T) {
	prod, cached, dev := exempt("a", "prod", 1, false), exempt("a", "prod", 1, true), exempt("a", "dev", 1, false)
	list := func(p ...store.ExemptPod) []store.ExemptPod { return p }
	for name, c := range map[string]struct {
		before, now []store.ExemptPod
		namespaces  string // before; those now are prod
		mine        string // the address is that of an attachment of the Enforcer, or moved from another namespace
		passes      bool
	}{
		"the same":                       {list(prod), list(prod), "prod", "", false},
		"the same one, of the cache now": {list(prod), list(cached), "prod", "", false},
		"a new one":                      {nil, list(prod), "prod", "", true},
		"a new one of the cache":         {nil, list(cached), "prod", "", false},
		"one that is gone":               {list(prod), nil, "prod", "", true},
		"another namespace":              {list(dev), list(prod), "prod", "", true},
		"a new list":                     {nil, list(prod), "", "", false},
		"a new list, of this ADD":        {nil, list(prod), "", "own", true},
		"a new list, moved":              {nil, nil, "", "moved", true},
		"a shorter list":                 {list(dev), nil, "dev", "", false},
	} {
		x := exemption{ExemptPods: store.ExemptPods{Namespaces: []string{"prod"}, Pods: c.now}}
		switch c.mine {
		case "own":
			x.own = []netip.Addr{prod.Address}
		case "moved":
			x.moved = []netip.Addr{prod.Address}
		}
		rec := store.Record{ExemptPods: store.ExemptPods{Namespaces: []string{c.namespaces}, Pods: c.before}}
		if passed := slices.Compact(x.passed(rec)); c.passes != slices.Equal(passed, []netip.Addr{prod.Address}) || !c.passes && len(passed) > 0 {
			t.Errorf("%s: %v pass", name, passed)
		}
	}
}

// TestRecordedPods: a record is that of the exempt pods, and no attachment loses an address.
func TestRecordedPods(t *testing.T) {
	prod, taken := exempt("a", "prod", 1, false), map[store.Attachment][]netip.Addr{{}: nil}
	rec := store.ExemptPods{Namespaces: []string{"prod"}, Pods: []store.ExemptPod{prod}}
	for _, c := range []struct {
		x                 exemption
		recorded, changes bool
	}{
		{exemption{ExemptPods: store.ExemptPods{Namespaces: rec.Namespaces, Pods: rec.Pods}}, true, false},
		{exemption{ExemptPods: store.ExemptPods{Namespaces: rec.Namespaces, Pods: rec.Pods}, taken: taken}, false, true},
		{exemption{ExemptPods: store.ExemptPods{Namespaces: []string{"dev"}, Pods: rec.Pods}}, false, false},
		{exemption{ExemptPods: store.ExemptPods{Namespaces: rec.Namespaces}}, false, true},
	} {
		s := State{node: node{exempt: c.x}, onRecord: onRecord{before: store.Record{ExemptPods: rec}, now: store.Record{ExemptPods: rec}}}
		if s.PodsRecorded() != c.recorded || s.ExemptionChanges() != c.changes {
			t.Errorf("%+v: recorded %t, changes %t", c.x, s.PodsRecorded(), s.ExemptionChanges())
		}
		s.onRecord.now = store.Record{ExemptPods: store.ExemptPods{Namespaces: c.x.Namespaces, Pods: c.x.Pods}} // while it is written
		if s.ExemptionChanges() != c.changes {
			t.Errorf("%+v: changes %t after it is on record", c.x, s.ExemptionChanges())
		}
	}
}

// A chain without sets exempts as many pods as it can, the oldest ones. A list of other namespaces comes into force as a whole or
// not at all.
func TestBound(t *testing.T) {
	e := &Enforcer{Drivers: netfiltertest.New().Drivers()}
	var pods []store.ExemptPod
	for i := range policy.MaxExemptPods + 1 {
		p := exempt(fmt.Sprint(i), "prod", int64(-i), false)
		p.Address = netip.AddrFrom4([4]byte{10, 88, byte(i >> 8), byte(i)})
		pods = append(pods, p)
	}
	dev := exempt("dev", "dev", 9, false)
	dev.Address = netip.MustParseAddr("10.89.0.1")
	pods = append(pods, dev)
	var many []netip.Prefix
	for i := range policy.MaxPodCIDRs + 1 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 1}), 32))
	}
	for name, c := range map[string]struct {
		in         netfilter.Choice
		namespaces []string // on record
		pods       []store.ExemptPod
		podCIDRs   []netip.Prefix
		beyond     int
	}{
		"too many":         {netfiltertest.IPTables, []string{"dev", "prod"}, pods, nil, 1},
		"with sets":        {netfiltertest.NFTables, []string{"dev", "prod"}, pods, nil, 0},
		"other namespaces": {netfiltertest.IPTables, []string{"prod"}, pods, nil, 0},
		"few pods":         {netfiltertest.IPTables, []string{"dev", "prod"}, pods[2:], many, 0},
	} {
		source := policy.SourcePolicy{Chain: "A", NonMasqueradeNamespaces: []string{"prod"}, PodCIDRs: c.podCIDRs}
		s := &State{onRecord: onRecord{now: store.Record{ExemptPods: store.ExemptPods{Namespaces: c.namespaces}}}}
		s.node.exempt = exemption{ExemptPods: store.ExemptPods{Namespaces: []string{"dev", "prod"}, Pods: c.pods}}
		s.Chains = []Chain{{Choice: c.in, Policy: policy.Merge([]policy.Source{{Policy: source}})[0]}}
		e.limitExemptPods(s, &s.Chains[0])
		oldest, newest := s.OverLimit([]netip.Addr{c.pods[len(c.pods)-2].Address}), s.OverLimit([]netip.Addr{pods[0].Address})
		if len(c.pods)-len(s.node.exempt.Pods) != c.beyond || oldest != nil || (newest != nil) != (c.beyond > 0) || !slices.Contains(s.node.exempt.Pods, dev) {
			t.Errorf("%s: of %d pods %d are exempt, errors %v and %v", name, len(c.pods), len(s.node.exempt.Pods), oldest, newest)
		}
	}
}

// TestBoundOfChains: a pod that one chain cannot exempt is exempt in none, and its ADD fails whichever of them its network has.
// Addresses of a family that a chain does not manage make no rule, and do not count.
func TestBoundOfChains(t *testing.T) {
	e := &Enforcer{Drivers: netfiltertest.New().Drivers()}
	var pods []store.ExemptPod
	for i := range policy.MaxExemptPods {
		p := exempt(fmt.Sprint(i), "prod", int64(-i), false)
		p.Address = netip.AddrFrom4([4]byte{10, 88, byte(i >> 8), byte(i)})
		pods = append(pods, p)
		p.Address = netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})
		pods = append(pods, p)
	}
	last := exempt("last", "prod", 1, false)
	last.Address = netip.MustParseAddr("10.89.0.1")
	for _, pods := range [][]store.ExemptPod{pods, append(slices.Clone(pods), last)} {
		namespaces := []string{"prod"}
		s := &State{onRecord: onRecord{now: store.Record{ExemptPods: store.ExemptPods{Namespaces: namespaces}}}}
		s.node.exempt = exemption{ExemptPods: store.ExemptPods{Namespaces: namespaces, Pods: pods}}
		for chain, in := range map[string]netfilter.Choice{"A": netfiltertest.NFTables, "B": netfiltertest.IPTables} {
			p := policy.Merge([]policy.Source{{Policy: policy.SourcePolicy{Chain: chain, NonMasqueradeNamespaces: namespaces}}})[0]
			s.Chains = append(s.Chains, Chain{Choice: in, Policy: p})
			e.limitExemptPods(s, &s.Chains[len(s.Chains)-1])
		}
		isFull, isExempt := s.OverLimit([]netip.Addr{last.Address}) != nil, slices.Contains(s.node.exempt.Pods, last)
		if isFull != slices.Contains(pods, last) || isExempt || isFull == (len(s.node.exempt.Pods) == len(pods)) {
			t.Errorf("of %d addresses %d are exempt; last: %t, error %t", len(pods), len(s.node.exempt.Pods), isExempt, isFull)
		}
		for _, c := range s.Chains {
			if c.Policy.SetExemptPods(s.node.exempt.Addresses()); len(c.Policy.ExemptPods) != policy.MaxExemptPods {
				t.Errorf("chain %s exempts %d addresses", c.Policy.Chain, len(c.Policy.ExemptPods))
			}
		}
	}
}

// TestPodsBeyondAsAWhole: of a pod that does not fit no address is exempt, whichever family it is of. A smaller one is.
func TestPodsBeyondAsAWhole(t *testing.T) {
	e := &Enforcer{Drivers: netfiltertest.New().Drivers()}
	var pods []store.ExemptPod
	for i := range policy.MaxExemptPods + 1 - 64 {
		p := exempt(fmt.Sprint(i), "prod", int64(i), false)
		p.Address = netip.AddrFrom4([4]byte{10, 88, byte(i >> 8), byte(i)})
		pods = append(pods, p)
	}
	fit := len(pods)
	for i := range 64 {
		p := exempt("many", "prod", policy.MaxExemptPods, false)
		p.Address = netip.AddrFrom4([4]byte{10, 89, 0, byte(i)})
		pods = append(pods, p)
	}
	p := exempt("many", "prod", policy.MaxExemptPods, false)
	p.Address = netip.MustParseAddr("fd00::1")
	later := exempt("later", "prod", policy.MaxExemptPods+1, false)
	later.Address = netip.MustParseAddr("10.90.0.1")
	pods = append(pods, p, later)
	namespaces := store.ExemptPods{Namespaces: []string{"prod"}, Pods: pods}
	rec := store.Record{ExemptPods: store.ExemptPods{Namespaces: []string{"prod"}}}
	s := &State{onRecord: onRecord{now: rec}, node: node{exempt: exemption{ExemptPods: namespaces}}}
	source := policy.SourcePolicy{Chain: "A", NonMasqueradeNamespaces: []string{"prod"}}
	s.Chains = []Chain{{Choice: netfiltertest.IPTables, Policy: policy.Merge([]policy.Source{{Policy: source}})[0]}}
	e.limitExemptPods(s, &s.Chains[0])
	if !slices.Equal(s.node.exempt.Pods, append(slices.Clone(pods[:fit]), later)) {
		t.Errorf("%d addresses are exempt, want the %d of the other pods", len(s.node.exempt.Pods), fit+1)
	}
	for _, a := range []netip.Addr{pods[fit].Address, pods[fit+63].Address, p.Address} {
		if s.OverLimit([]netip.Addr{a}) == nil {
			t.Errorf("an ADD of a pod with %s passes", a)
		}
	}
}

// TestExemptPodsKeepTheirRoom: a pod that is exempt stays exempt beside an older one that was recorded later: from the runtime's
// cache, or by an ADD that failed.
func TestExemptPodsKeepTheirRoom(t *testing.T) {
	e := &Enforcer{Drivers: netfiltertest.New().Drivers()}
	var pods []store.ExemptPod
	for i := range policy.MaxExemptPods {
		p := exempt(fmt.Sprint(i), "prod", int64(i+9), false)
		p.Address = netip.AddrFrom4([4]byte{10, 88, byte(i >> 8), byte(i)})
		pods = append(pods, p)
	}
	older := exempt("older", "prod", 1, true)
	older.Address = netip.MustParseAddr("10.89.0.1")
	recorded := store.ExemptPods{Namespaces: []string{"prod"}, Pods: pods}
	found := store.ExemptPods{Namespaces: []string{"prod"}, Pods: append(slices.Clone(pods), older)}
	s := &State{onRecord: onRecord{now: store.Record{ExemptPods: recorded}}, node: node{exempt: exemption{ExemptPods: found}}}
	source := policy.SourcePolicy{Chain: "A", NonMasqueradeNamespaces: []string{"prod"}}
	s.Chains = []Chain{{Choice: netfiltertest.IPTables, Policy: policy.Merge([]policy.Source{{Policy: source}})[0]}}
	e.limitExemptPods(s, &s.Chains[0])
	if !slices.Equal(s.node.exempt.Pods, pods) || s.OverLimit([]netip.Addr{older.Address}) == nil {
		t.Errorf("%d addresses are exempt, an older one too: %t", len(s.node.exempt.Pods), slices.Contains(s.node.exempt.Pods, older))
	}
	if errs := s.PodsWithoutRoom(); len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), "1 of these pods are not exempt: chain A: ") {
		t.Errorf("pods without room: %v", errs)
	}
}

// TestResetList: an equal reset is renewed, there is one for all addresses that passed, or left, and the oldest one for other
// policies is forgotten where there are too many.
func TestResetList(t *testing.T) {
	a, b := netip.MustParseAddr("10.88.0.5"), netip.MustParseAddr("10.88.0.6")
	leaving := func(a ...netip.Addr) (list []store.ChainAddress) {
		for _, address := range a {
			list = append(list, store.ChainAddress{Chain: "A", Address: address})
		}
		return list
	}
	before := func(i int) store.Reset {
		return store.Reset{Before: []policy.Source{{ID: policy.SourceID{Name: fmt.Sprint(i)}}}}
	}
	text := func(r resetList) (text string) {
		for _, x := range r.list {
			text += fmt.Sprintf("%d:%v%v%d ", x.At, x.Passed, x.Left, len(x.Before))
		}
		return text
	}
	r := resetList{at: 7}
	r.add(store.Reset{})
	r.addPassed([]netip.Addr{b})
	r.addLeft(leaving(b))
	r.addPassed(nil)
	r.addLeft(nil)
	r.addPassed([]netip.Addr{a})
	r.addLeft(leaving(a))
	r.add(store.Reset{})
	if got, want := text(r), "10:[10.88.0.5 10.88.0.6][]0 11:[][{A 10.88.0.5} {A 10.88.0.6}]0 12:[][]0 "; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	r.at = 100
	for i := range 2 * maxChanges {
		r.add(before(i))
	}
	r.add(store.Reset{})
	if n := len(r.list); n != maxChanges+3 || len(r.list[0].Passed) == 0 || len(r.list[1].Left) == 0 || r.list[2].Before[0].ID.Name != fmt.Sprint(maxChanges) {
		t.Errorf("%d resets: %s", n, text(r))
	}
}
