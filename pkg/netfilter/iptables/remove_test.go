// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestRemove(t *testing.T) {
	inEachVariant(t, func(n *node) {
		before := map[policy.Family]string{}
		for _, f := range policy.Families() {
			n.load(f, ":FOREIGN -", "-A POSTROUTING -p udp -j FOREIGN", "-A FOREIGN -j RETURN")
			before[f] = n.save(f)
		}
		scoped := basic("TWO")
		scoped.Sources.Value = prefixList("10.0.0.0/8", "fd00::/8")
		scoped.Interfaces.Value = []string{"eth0", "wl+"}
		n.apply(desired(policy.OwnedBy(owner), basic("ONE"), scoped))
		for _, f := range policy.Families() {
			n.load(f, "-A ONE -p icmp -j ACCEPT", "-A TWO -j ONE",
				`-A POSTROUTING -m mark --mark 0x1/0x2 -m comment --comment "\"odd\" it's" -j ONE`, "-A POSTROUTING -g TWO", "-A POSTROUTING -j ONE")
		}
		all := bothFamilies("ONE", "TWO", "NEVER-THERE")
		if err := n.Remove(n.Context(), all, nil); err != nil {
			n.Fatal(err)
		}
		for _, f := range policy.Families() {
			if diff := cmp.Diff(before[f], n.save(f)); diff != "" {
				n.Errorf("%s: not as before (-before +after):\n%s", f, diff)
			}
		}
		n.idle("Remove of what is not there", func() {
			if err := n.Remove(n.Context(), all, nil); err != nil {
				n.Error(err)
			}
		})
	})
}

func TestRemoveNamesWhoStillJumps(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("ONE")))
		n.load(policy.IPv4, ":FOREIGN -", "-A FOREIGN -p udp -j ONE")
		before := n.save(policy.IPv4)
		err := n.Remove(n.Context(), bothFamilies("ONE"), nil)
		if err == nil || !strings.Contains(err.Error(), `chain ONE is still used by "-A FOREIGN -p udp -j ONE"`) {
			n.Errorf("got %v", err)
		}
		if diff := cmp.Diff(before, n.save(policy.IPv4)); diff != "" {
			n.Errorf("half removed (-before +after):\n%s", diff)
		}
		if got := n.save(policy.IPv6); strings.Contains(got, "ONE") {
			n.Errorf("the failure of one family kept the other:\n%s", got)
		}
	})
}

// TestDeleteRefusesLineFeeds has a jump that iptables-restore would not delete
// but read as two commands, the second of somebody's choice.
func TestDeleteRefusesLineFeeds(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		out, err := n.command(policy.IPv4, "", "", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", "a\n-F OTHER", "-j", "X")
		if err != nil {
			n.Fatal(err, out)
		}
		before := n.save(policy.IPv4)
		for what, err := range map[string]error{"Apply": n.Apply(n.Context(), want, netfilter.Observation{}, nil), "Remove": n.Remove(n.Context(), refs(want), nil)} {
			if err == nil || !strings.Contains(err.Error(), "delete it with iptables -D") {
				n.Errorf("%s: %v", what, err)
			}
		}
		if diff := cmp.Diff(before, n.save(policy.IPv4)); diff != "" {
			n.Errorf("something was written (-before +after):\n%s", diff)
		}
	})
}
