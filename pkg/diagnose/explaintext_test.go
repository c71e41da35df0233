// SPDX-License-Identifier: Apache-2.0

package diagnose_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// cases are questions, with the answers for people and for programs.
func cases(t *testing.T) map[string]diagnose.Explanation {
	pods := fromOnly("10.244.0.0/16")
	sound := func() *node {
		n := newNode(network("podnet", "IP-MASQ-AGENT", pods), agentFiles("IP-MASQ-AGENT", file("/etc/config/ip-masq agent\n",
			exempting("172.16.0.0/16", "172.17.0.0/16", "172.18.0.0/16", "172.19.0.0/16", "172.20.0.0/16"))))
		n.finder.ConfDir = confDir(t, map[string]string{"10-podnet.conflist": conflist("podnet",
			`, "nonMasqueradeCIDRs": ["10.0.0.0/8", "192.168.0.0/16"], "sourceCIDRs": ["10.244.0.0/16"]`)})
		n.finder.Since = since
		return n
	}
	drifted := sound()
	drifted.tamper(policy.IPv4, "IP-MASQ-AGENT", func(c *policy.Chain) { c.Rules = c.Rules[5:] })
	emptied := newNode(network("podnet", "A", exempting("10.0.0.0/16", "10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16",
		"10.5.0.0/16", "10.6.0.0/16", "10.7.0.0/16", "10.8.0.0/16")))
	emptied.tamper(policy.IPv4, "A", func(c *policy.Chain) { c.Rules = nil })
	two := newNode(network("a", "A", exempting("0.0.0.0/0")), network("b", "B", inNFT, fromOnly("10.9.0.0/16")))
	two.tamper(policy.IPv4, "B", func(c *policy.Chain) { c.Jumps[0].From = nil })
	unread := sound()
	unread.view.Chains[0].Err = errors.New("read the rules of chain IP-MASQ-AGENT in iptables (nft): " +
		"observe ipv4 of iptables (nft): operation not permitted")
	askWith := func(n *node, outcomes []thirdparty.Outcome, dst, src, out string) diagnose.Explanation {
		q := question(dst, src, out)
		q.ThirdParty = (&judge{verdict: thirdparty.Verdict{Outcomes: outcomes}}).read
		return n.explain(q)
	}
	ask := func(n *node, dst, src, out string) diagnose.Explanation {
		return askWith(n, []thirdparty.Outcome{untouched}, dst, src, out)
	}
	beside := func(dst, src string, outcomes ...thirdparty.Outcome) diagnose.Explanation {
		return askWith(sound(), outcomes, dst, src, "")
	}
	guarded := newNode(network("podnet", "IP-MASQ-AGENT", pods, func(s *policy.SourcePolicy) {
		s.Guard, s.EnforceExempt = policy.GuardDrop, new(true)
	}))
	enforced := askWith(guarded, []thirdparty.Outcome{ownedDecides}, "192.168.7.7", "10.244.0.2", "")
	behindMacvlan := question("8.8.8.8", "10.244.0.2", "")
	behindMacvlan.NoHook = "macvlan"
	marked := question("192.168.7.7", "10.244.0.2", "")
	marked.Mark = 0x4000
	marked.ThirdParty = (&judge{verdict: thirdparty.Verdict{Outcomes: []thirdparty.Outcome{masqueradedBy("KUBE-POSTROUTING")}}}).read
	route := func(n *node, err error, hops ...string) diagnose.Explanation {
		q := question("8.8.8.8", "10.244.0.2", "")
		q.Hops, q.RouteErr = hops, err
		return n.explain(q)
	}
	return map[string]diagnose.Explanation{
		"route":            route(sound(), nil, "eth0"),
		"no-route":         route(sound(), errors.New("network is unreachable")),
		"next-hops":        route(sound(), nil, "eth0", "eth1"),
		"guarded":          ask(guarded, "8.8.8.8", "", ""),
		"enforced":         enforced,
		"overridden":       beside("192.168.7.7", "10.244.0.2", masqueradedBy("A"), masqueradedBy("B")),
		"overridden-maybe": beside("192.168.7.7", "", masqueradedBy("A"), untouched),
		"by-third-party":   beside("8.8.8.8", "10.244.0.2", masqueradedBy("A")),
		"marked":           sound().explain(marked),
		"masqueraded":      ask(sound(), "8.8.8.8", "10.244.0.2", "eth0"),
		"exempt":           ask(sound(), "192.168.7.7", "", ""),
		"by-agent-files":   ask(sound(), "172.20.1.1", "", ""),
		"built-in":         ask(sound(), "169.254.169.254", "", ""),
		"out-of-scope":     ask(sound(), "8.8.8.8", "192.0.2.7", ""),
		"no-effect":        guarded.explain(behindMacvlan),
		"multicast":        ask(sound(), "239.1.1.1", "10.244.0.2", ""),
		"drifted":          ask(drifted, "192.168.7.7", "", ""),
		"emptied":          ask(emptied, "8.8.8.8", "", ""),
		"both-masquerade":  ask(newNode(network("a", "A"), network("b", "B", fromOnly("10.9.0.0/16"))), "8.8.8.8", "10.9.0.2", ""),
		"two-chains":       ask(two, "8.8.8.8", "", ""),
		"unread":           ask(unread, "8.8.8.8", "", ""),
		"nothing":          ask(newNode(), "8.8.8.8", "", ""),
	}
}

func TestTextAndJSON(t *testing.T) {
	age := regexp.MustCompile(`UTC \(\d+d\d+h\)`)
	for name, e := range cases(t) {
		t.Run(name, func(t *testing.T) {
			var text bytes.Buffer
			e.Text(&text)
			golden.Check(t, "testdata/explain/"+name+".txt", age.ReplaceAll(text.Bytes(), []byte("UTC (AGE)")))
			var doc bytes.Buffer
			encoder := json.NewEncoder(&doc)
			encoder.SetIndent("", "  ")
			assert.NoError(t, encoder.Encode(e))
			golden.Check(t, "testdata/explain/"+name+".json", doc.Bytes())
		})
	}
}

// TestAge checks the two units of an age.
func TestAge(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m", 3*time.Hour + 59*time.Second: "3h0m",
		23*time.Hour + 59*time.Minute: "23h59m", 75 * time.Hour: "3d3h",
	} {
		assert.Equal(t, d.String(), diagnose.Age(d), want)
	}
}
