// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// invalidKey is an invalid value of a key, and what the error must contain.
type invalidKey struct {
	key   string
	value any // marshaled to JSON
	msgs  []string
}

func raw(s string) json.RawMessage { return json.RawMessage(s) }

func invalidKeys() []invalidKey {
	return append(invalidPrefixLists(), []invalidKey{
		// Keys.
		{"nonMasqueradeCidrs", []string{}, []string{`nonMasqueradeCidrs: is not a known key; did you mean nonMasqueradeCIDRs?`}},
		{"nonmasqueradeCIDRs", []string{}, []string{`did you mean nonMasqueradeCIDRs?`}},
		{"masquerade_cidrs", []string{}, []string{`masquerade_cidrs: is not a known key; did you mean masqueradeCIDRs?`}},
		{"resyncInterval", "60s", []string{`resyncInterval: is not a known key; remove it`}},
		{"x\ny", 1, []string{`"x\ny": is not a known key; remove it`}},
		{strings.Repeat("k", 5000), 1, []string{`…": is not a known key; remove it`}},
		// Booleans.
		{"enableIPv6", "true", []string{`enableIPv6: "true" is a string; write true without quotes`}},
		{"randomFully", "no", []string{`randomFully: "no" is a string; write true or false, without quotes`}},
		{"masqueradeHost", 1, []string{`masqueradeHost: 1 is a number; write true or false`}},
		{"masqLinkLocal", raw("null"), []string{`masqLinkLocal: null is no value; write true or false, or leave the key out`}},
		{"masqLinkLocalIPv6", []bool{true}, []string{`masqLinkLocalIPv6: [true] is a list; write true or false`}},
		{"nomasqAllReservedRanges", object{}, []string{`nomasqAllReservedRanges: {} is an object; write true or false`}},
		{"requireAgentConfig", "False", []string{`requireAgentConfig: "False" is a string; write false without quotes`}},
		// Numbers.
		{"cidrLimit", 0, []string{`cidrLimit: 0 is not a whole number from 1 to 1000000`}},
		{"cidrLimit", -1, []string{`cidrLimit: -1 is not a whole number`}},
		{"cidrLimit", 1000001, []string{`cidrLimit: 1000001 is not a whole number from 1 to 1000000`}},
		{"cidrLimit", 1.5, []string{`cidrLimit: 1.5 is not a whole number`}},
		{"cidrLimit", "64", []string{`cidrLimit: "64" is a string; write it without quotes`}},
		{"cidrLimit", raw("null"), []string{`cidrLimit: null is no value`}},
		// Ports.
		{"toPorts", "0-100", []string{`toPorts: 0-100`}},
		{"toPorts", "65536", []string{`toPorts: 65536`}},
		{"toPorts", "2000-1000", []string{`toPorts: 2000-1000`}},
		{"toPorts", "1-100,50-200", []string{`toPorts: 1-100,50-200`, "overlap"}},
		{"toPorts", "80,80", []string{`toPorts: 80,80`, "overlap"}},
		{"toPorts", "http", []string{`toPorts: http`}},
		{"toPorts", "1-2-3", []string{`toPorts: 1-2-3`}},
		{"toPorts", "1024,", []string{`toPorts: 1024,`}},
		{"toPorts", 8080, []string{`toPorts: 8080 is a number; write it in quotes: "8080"`}},
		// The guard's keys.
		{"guard", "on", []string{`guard: on is not one of the choices; write off, count or drop`}},
		{"guard", false, []string{`guard: false is a boolean; write "off", "count" or "drop"`}},
		{"staleConnections", "drop", []string{`staleConnections: drop is not one of the choices; write keep or reset`}},
		{"enforceExempt", "yes", []string{`enforceExempt: "yes" is a string; write true or false, without quotes`}},
		{"bypassMark", 24576, []string{`bypassMark: 24576 is a number; write it in quotes: "0x6000"`}},
		{"bypassMark", "0x4000/0x4000", []string{`bypassMark: 0x4000/0x4000 is not a 32-bit mask; write a hexadecimal number such as 0x6000, or 0 for none`}},
		// Chains.
		{"masqChain", "", []string{`masqChain: is empty; leave the key out for IP-MASQ-AGENT`}},
		{"masqChain", "POSTROUTING", []string{`masqChain: POSTROUTING is the name of a built-in chain or target`}},
		{"masqChain", "Masquerade", []string{`masqChain: Masquerade is the name of a built-in chain or target`}},
		{"masqChain", "KUBE-MARK-MASQ", []string{`masqChain: KUBE-MARK-MASQ begins with KUBE-, a prefix of chains of other programs`}},
		{"masqChain", "cni-0123", []string{`masqChain: cni-0123 begins with CNI-, a prefix of chains of other programs`}},
		{"masqChain", "ABCDEFGHIJKLMNOPQRSTUVWXY", []string{`masqChain: ABCDEFGHIJKLMNOPQRSTUVWXY has 25 characters; at most 24`}},
		{"masqChain", "A B", []string{`masqChain: "A B" may hold only letters, digits`}},
		{"masqChain", "A\n-F", []string{`masqChain: "A\n-F" may hold only letters, digits`}},
		{"masqChain", "-j", []string{`masqChain: -j must begin with a letter or a digit`}},
		{"masqChain", 7, []string{`masqChain: 7 is a number; write it in quotes: "7"`}},
		// Interfaces.
		{"outputInterfaces", []string{"+"}, []string{`outputInterfaces[0]: + would match every interface`}},
		{"outputInterfaces", []string{"eth0", "sixteen-letters-"}, []string{`outputInterfaces[1]: sixteen-letters- is longer than the 15 bytes`}},
		{"outputInterfaces", []string{"a/b"}, []string{`outputInterfaces[0]: a/b is not the name of an interface`}},
		{"outputInterfaces", []string{"a -j ACCEPT"}, []string{`outputInterfaces[0]: "a -j ACCEPT" is not the name of an interface`}},
		{"outputInterfaces", []string{""}, []string{`outputInterfaces[0]: is empty; name an interface, or drop the item`}},
		// Other keys.
		{"backend", "ebpf", []string{`backend: ebpf is not one of the choices; write auto, iptables or nftables`}},
		{"backend", "NFTables", []string{`backend: NFTables is not one of the choices`}},
		{"backend", raw("null"), []string{`backend: null is no value`}},
		{"dataDir", "state", []string{`dataDir: state is relative; write an absolute path such as /var/lib/cni/ip-masq`}},
		{"dataDir", "", []string{`dataDir: is empty`}},
		{"dataDir", "/", []string{`dataDir: / is the root directory`}},
		{"dataDir", "/var/../etc", []string{`dataDir: /var/../etc is not the shortest way to write this path; did you mean "/etc"?`}},
		{"name", "../x", []string{"invalid characters found in network name"}}, // refused by the CNI library
	}...)
}

// invalidPrefixLists returns invalid values for each list of prefixes.
func invalidPrefixLists() []invalidKey {
	var all []invalidKey
	for _, key := range []string{"nonMasqueradeCIDRs", "masqueradeCIDRs", "sourceCIDRs", "nonMasqueradeSourceCIDRs", "podCIDRs"} {
		for _, m := range []invalidKey{
			{"", []string{"10.5.0.0/16", "10.6.0.0/16", "10.0.1.24/24"}, []string{`[2]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?`}},
			{"", []string{"10.0.0.0"}, []string{`[0]: 10.0.0.0 `, "10.0.0.0/32"}},
			{"", []string{"10.0.0.0/33"}, []string{`[0]: 10.0.0.0/33 `}},
			{"", []string{"10.0.0/8"}, []string{`[0]: 10.0.0/8 `}},
			{"", []string{"example.com"}, []string{`[0]: example.com `}},
			{"", []string{"::ffff:10.0.0.0/104"}, []string{`[0]: ::ffff:10.0.0.0/104 `, "10.0.0.0/8"}},
			{"", []string{"fe80::%eth0/64"}, []string{`[0]: fe80::%eth0/64 `}},
			{"", []string{"fd00::/8"}, []string{`[0]: fd00::/8 is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it`}},
			{"", []string{"10.5.0.0/16", ""}, []string{`[1]: `, "drop the item"}},
			{"", raw(`["10.5.0.0/16", null]`), []string{`[1]: null is no value; `, "drop the item"}},
			{"", raw(`[10]`), []string{`[0]: 10 is a number; write a string such as "10.0.0.0/8"`}},
			{"", raw(`null`), []string{`: null is no value; write [] for none, or leave the key out`}},
			{"", "10.0.0.0/8", []string{`: "10.0.0.0/8" is a string; write a list: ["10.0.0.0/8"]`}},
		} {
			m.key = key
			m.msgs[0] = key + m.msgs[0]
			all = append(all, m)
		}
	}
	return all
}

// TestBadInput checks that each invalid key gives error 7 with key, item, value and remedy, and
// that neither the rules nor the state change.
func TestBadInput(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		fresh := n.snapshot(t)
		bad := n.conf(t, "podnet", object{"masqueradeCIDRs": []string{"10.0.0.1/8"}, "enableIPv6": true})
		n.invoke(t, invocation{verb: "ADD", conf: bad}).want(t, 7)
		n.unchanged(t, fresh) // not even a dataDir
		n.addAndCheck(t, n.conf(t, "podnet", nil))
		before, generation := n.snapshot(t), n.generation(t)
		for i, m := range invalidKeys() {
			t.Run(fmt.Sprint(i, " ", m.key[:min(len(m.key), 30)]), func(t *testing.T) {
				a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{m.key: m.value}), id: "newcomer"})
				a.want(t, 7, m.msgs...)
				if strings.Contains(a.msg, "\n") || len(a.msg) > 1024 {
					t.Errorf("message has several lines or more than 1024 bytes:\n%s", a.msg)
				}
				if state := tree(t, n.dataDir); state != before.state || n.generation(t) != generation {
					n.unchanged(t, before)
				}
			})
		}
		n.unchanged(t, before)
	})
}

// TestBadKeyCombinations checks entries in which each key is valid by itself.
func TestBadKeyCombinations(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.addAndCheck(t, n.conf(t, "podnet", nil))
	before := n.snapshot(t)
	var many []string
	for i := range 65 {
		many = append(many, fmt.Sprintf("10.%d.0.0/16", i))
	}
	for name, c := range map[string]struct {
		keys object
		msgs []string
	}{
		"prefix in both lists": {
			object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "10.0.0.0/8", "10.1.0.0/16"}, "masqueradeCIDRs": []string{"10.2.0.0/16", "10.1.0.0/16"}},
			[]string{"masqueradeCIDRs[1]: 10.1.0.0/16 is in nonMasqueradeCIDRs too; remove one of the two"},
		},
		"one list above the default limit": {
			object{"nonMasqueradeCIDRs": many},
			[]string{"cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 65 entries together, more than the 64 allowed", "raise cidrLimit"},
		},
		"both lists above cidrLimit": {
			object{"nonMasqueradeCIDRs": many[:2], "masqueradeCIDRs": many[2:4], "cidrLimit": 3},
			[]string{"have 4 entries together, more than the 3 allowed"},
		},
		"several invalid keys": {
			object{"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}, "toPorts": "x", "enableipv6": true, "masqChain": "RETURN"},
			[]string{"nonMasqueradeCIDRs[0]: 10.0.0.1/8", "toPorts: x", "enableipv6: is not a known key; did you mean enableIPv6?", "masqChain: RETURN"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", c.keys)})
			a.want(t, 7, append(c.msgs, `network "podnet"`)...)
			n.unchanged(t, before)
		})
	}
	t.Run("duplicate key", func(t *testing.T) {
		conf := strings.Replace(n.conf(t, "podnet", nil), "{", `{"cidrLimit": 3, "cidrLimit": 4, `, 1)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, "cidrLimit: is there twice; write it once")
		n.unchanged(t, before)
	})
	t.Run("list at the limit with a duplicate", func(t *testing.T) {
		keys := object{"nonMasqueradeCIDRs": append([]string{"10.0.0.0/16"}, many[:64]...)}
		n.addAndCheck(t, n.conf(t, "podnet", keys))
	})
}

// TestProtocolKeys checks that the plugin accepts the keys that the CNI protocol and runtimes add.
func TestProtocolKeys(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	conf := n.conf(t, "podnet", object{
		"runtimeConfig": object{"portMappings": []int{}}, "capabilities": object{"bandwidth": true}, "args": object{"cni": object{}},
		"ipam": object{"type": "host-local"}, "dns": object{}, "ipMasq": false, "cni.dev/valid-attachments": nil, "cni.dev/anything": 1,
	})
	n.addAndCheck(t, conf).noWarnings(t)
}
