// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestPodSubnets checks that the document of a network has the subnets of the addresses that ADD
// found in prevResults, that they stay if the policy changes, and that an ADD with known subnets
// reads only.
func TestPodSubnets(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := func(address string, keys object) string {
		all := object{"prevResult": object{"cniVersion": "1.1.0", "ips": []object{{"address": address}}}}
		for key, value := range keys {
			all[key] = value
		}
		return n.conf(t, "podnet", all)
	}
	want := func(subnets string) {
		t.Helper()
		if got := fmt.Sprint(n.load(t).Find(networkID("podnet")).PodSubnets); got != subnets {
			t.Fatalf("subnets are %s, want %s", got, subnets)
		}
	}
	add := func(conf string) result { return n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0) }

	add(n.conf(t, "podnet", nil)).noWarnings(t)
	want("[10.1.0.0/16]")
	add(n.conf(t, "podnet", nil)) // fills the verification cache
	hourAgo := time.Now().Add(-time.Hour)
	must(t, os.Chtimes(store.Open(n.dataDir).DocumentPath(networkID("podnet")), hourAgo, hourAgo))
	wantOld := func(old bool) {
		t.Helper()
		if stdout, _, _ := n.reconciler(t, "status"); strings.Contains(stdout, "podnet  in force  1h0m") != old {
			t.Errorf("the policy is an hour old: want %t; status prints\n%s", old, stdout)
		}
	}
	add(conf("10.0.7.2/24", nil)).noWarnings(t)
	want("[10.0.7.0/24 10.1.0.0/16]")
	wantOld(true)
	rules, order := n.generation(t), n.load(t).Find(networkID("podnet")).Order
	add(n.conf(t, "podnet", object{"cniVersion": "0.2.0", "prevResult": object{
		"cniVersion": "0.2.0", "ip4": object{"ip": "10.2.0.2/24"}, "ip6": object{"ip": "fd00:2::5/64"},
	}})).noWarnings(t)
	want("[10.0.7.0/24 10.1.0.0/16 10.2.0.0/24 fd00:2::/64]")
	if n.generation(t) != rules || n.load(t).Find(networkID("podnet")).Order != order {
		t.Error("a new subnet counts as another policy")
	}

	add(n.conf(t, "podnet", nil))
	add(conf("10.3.0.2/32", nil)) // of no subnet
	documents, release := n.documentStamps(t), n.holdLock(t)
	for _, c := range []string{conf("10.2.0.7/24", nil), conf("10.0.7.9/24", nil), n.conf(t, "podnet", nil), conf("10.3.0.2/32", nil), conf("fe80::2/64", nil)} {
		add(c).noWarnings(t)
	}
	release()
	n.invoke(t, invocation{verb: "STATUS", conf: conf("10.4.0.2/24", nil)}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf("10.4.0.2/24", nil)}).want(t, 0)
	n.invoke(t, invocation{verb: "ADD", conf: conf("10.4.0.2/24", object{"guard": "on"})}).want(t, 7)
	if n.documentStamps(t) != documents {
		t.Error("a document was written")
	}
	conflist := n.writeDefaultConflist(t, "podnet", nil)
	add(conf("10.4.0.2/24", object{"masqLinkLocal": true})).want(t, 0, "older entry") // the pod has its subnet all the same
	must(t, os.Remove(conflist))

	add(conf("10.5.0.2/24", object{"masqLinkLocal": true}))
	want("[10.0.7.0/24 10.1.0.0/16 10.2.0.0/24 10.4.0.0/24 10.5.0.0/24 fd00:2::/64]")
	wantOld(false)
	n.conflist(t, "podnet", object{"masqLinkLocal": false})
	n.reconcileOnce(t)
	if linkLocal := n.load(t).Find(networkID("podnet")).Policy.MasqLinkLocal; linkLocal == nil || *linkLocal {
		t.Fatal("the reconciler did not store the conflist's policy")
	}
	want("[10.0.7.0/24 10.1.0.0/16 10.2.0.0/24 10.4.0.0/24 10.5.0.0/24 fd00:2::/64]")

	n.readOnly(t, n.dataDir)
	add(conf("10.6.0.2/24", object{"masqLinkLocal": false})).want(t, 0, "the rules are right, but the state cannot be written", "read-only file system")
	want("[10.0.7.0/24 10.1.0.0/16 10.2.0.0/24 10.4.0.0/24 10.5.0.0/24 fd00:2::/64]")
}
