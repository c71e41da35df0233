// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"strings"
	"testing"
	"time"
)

// TestElementsThatExpire replaces the owned sets by sets whose elements expire after a second,
// which makes no commit. It checks that ADD and CHECK do not accept these sets, and that later ADDs
// do not trust the verification cache.
func TestElementsThatExpire(t *testing.T) {
	t.Parallel()
	const expire = time.Second
	n := newNode(t, backends()[0])
	keys := dualStack(nil)
	n.conflist(t, "podnet", keys)
	pods, conf := onlyPod(n.pod(t, "podnet")), n.conf(t, "podnet", keys)
	for i, family := range families() {
		n.feed(t, strings.NewReplacer("FAM", family[1], "TYPE", []string{"ipv4_addr", "ipv6_addr"}[i],
			"ELEMENTS", []string{"10.0.0.0/8, 169.254.0.0/16", "fd00::/8, fe80::/10"}[i]).Replace(
			`add set FAM ip-masq exempt-IP-MASQ-AGENT.2 { type TYPE; flags interval, timeout; timeout 1s; elements = { ELEMENTS } }
			flush chain FAM ip-masq masq-IP-MASQ-AGENT
			add rule FAM ip-masq masq-IP-MASQ-AGENT FAM daddr @exempt-IP-MASQ-AGENT.2 counter return
			add rule FAM ip-masq masq-IP-MASQ-AGENT counter masquerade fully-random
			delete set FAM ip-masq exempt-IP-MASQ-AGENT
			`), "nft", "-f", "-")
	}
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101, `set "exempt-IP-MASQ-AGENT.2"`)
	for range 3 {
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	}
	time.Sleep(expire + expire/2)
	n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
	pods.verdicts(t, n, false, flows{"pod": "10.9.9.9 fd00:9::9"})
	pods.verdicts(t, n, true, flows{"pod": "1.2.3.4 2001:db8:5::5"})
}
