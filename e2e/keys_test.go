// SPDX-License-Identifier: Apache-2.0

package e2e

import "testing"

// keyCase is an entry with the expected verdicts.
type keyCase struct {
	name string
	keys map[string]any
	// exempt and masqueraded are destinations by sender.
	exempt, masqueraded map[string]string
}

type (
	object = map[string]any
	flows  = map[string]string
)

// TestKeys checks which packets each key exempts or masquerades, at the boundaries of its prefixes,
// for both families, UDP and TCP.
func TestKeys(t *testing.T) {
	t.Parallel()
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			for _, c := range append(destinationCases(), scopeCases()...) {
				t.Run(c.name, func(t *testing.T) {
					t.Parallel()
					n := newNode(t, f)
					n.conflist(t, "podnet", c.keys)
					all := newSenders(t, n, n.pod(t, "podnet"))
					all.verdicts(t, n, false, c.exempt)
					all.verdicts(t, n, true, c.masqueraded)
					if t.Failed() {
						t.Log(n.rules(t))
					}
				})
			}
		})
	}
}

func destinationCases() []keyCase {
	return []keyCase{{
		name: "no keys",
		keys: object{},
		exempt: flows{
			"pod": "10.0.0.0 10.255.255.255 172.16.0.0 172.31.255.255 192.168.0.0 192.168.255.255 169.254.0.0 169.254.255.255 " +
				"2001:db8:5::5 fd00:9::9", // IPv6 is not enabled
			"vip": "10.9.9.9 2001:db8:5::5", "transit": "10.9.9.9 2001:db8:5::5",
		},
		masqueraded: flows{
			"pod": "9.255.255.255 11.0.0.0 172.15.255.255 172.32.0.0 192.167.255.255 192.169.0.0 169.253.255.255 169.255.0.0 100.64.0.1 240.0.0.1",
			"vip": "1.2.3.4", "transit": "1.2.3.4",
		},
	}, {
		name:        "nonMasqueradeCIDRs empty",
		keys:        object{"nonMasqueradeCIDRs": []string{}, "enableIPv6": true},
		exempt:      flows{"pod": "169.254.5.5"},
		masqueraded: flows{"pod": "10.9.9.9 172.16.0.1 192.168.3.3 1.2.3.4 fd00:9::9 2001:db8:5::5"},
	}, {
		name: "nonMasqueradeCIDRs listed",
		keys: object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "1.2.3.0/24", "5.6.7.8/32", "fd00::/8", "2001:db8:5::/48", "2001:db8:7::1/128"}, "enableIPv6": true},
		exempt: flows{"pod": "10.9.9.9 1.2.3.0 1.2.3.255 5.6.7.8 169.254.5.5 fd00:9::9 fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff " +
			"2001:db8:5:: 2001:db8:5:ffff:ffff:ffff:ffff:ffff 2001:db8:7::1"},
		masqueraded: flows{"pod": "1.2.2.255 1.2.4.0 5.6.7.7 5.6.7.9 192.168.3.3 172.16.0.1 fcff:ffff:ffff:ffff:ffff:ffff:ffff:ffff " +
			"2001:db8:4:ffff:ffff:ffff:ffff:ffff 2001:db8:6:: 2001:db8:7:: 2001:db8:7::2"},
	}, {
		name: "masqueradeCIDRs inside exempt",
		keys: object{
			"nonMasqueradeCIDRs": []string{"10.9.9.0/24", "10.0.0.0/8", "fd00::/8", "fd00:9:9::/48"},
			"masqueradeCIDRs":    []string{"10.9.0.0/16", "10.9.9.9/32", "fd00:9::/32"}, "enableIPv6": true,
		},
		exempt:      flows{"pod": "10.8.255.255 10.10.0.0 10.9.9.0 10.9.9.8 10.9.9.10 10.9.9.255 fd00:8::1 fd00:a::1 fd00:9:9::1"},
		masqueraded: flows{"pod": "10.9.0.0 10.9.8.255 10.9.9.9 10.9.10.0 10.9.255.255 11.0.0.0 fd00:9:8::1 fd00:9:a::1 2001:db8:5::5"},
	}, {
		name: "masqueradeCIDRs only these",
		keys: object{
			"nonMasqueradeCIDRs": []string{"0.0.0.0/0", "::/0"},
			"masqueradeCIDRs":    []string{"1.2.3.0/24", "2001:db8:5::/48"}, "enableIPv6": true,
		},
		exempt:      flows{"pod": "1.2.2.255 1.2.4.0 10.9.9.9 8.8.8.8 240.0.0.1 2001:db8:4::1 2001:db8:6::1 fd00:9::9"},
		masqueraded: flows{"pod": "1.2.3.0 1.2.3.255 2001:db8:5::5"},
	}, {
		name:        "masqueradeCIDRs and default exemptions",
		keys:        object{"masqueradeCIDRs": []string{"169.254.0.0/16", "192.168.0.0/16"}},
		exempt:      flows{"pod": "10.9.9.9 172.16.0.1"},
		masqueraded: flows{"pod": "169.254.5.5 192.168.3.3 1.2.3.4"},
	}, {
		name: "nomasqAllReservedRanges",
		keys: object{"nomasqAllReservedRanges": true},
		exempt: flows{"pod": "10.9.9.9 172.16.0.1 192.168.3.3 100.64.0.0 100.127.255.255 192.0.0.1 192.0.2.1 192.88.99.1 " +
			"198.18.0.0 198.19.255.255 198.51.100.1 203.0.113.77 240.0.0.0 255.255.255.254 169.254.5.5"},
		masqueraded: flows{"pod": "100.63.255.255 100.128.0.0 192.0.1.0 192.0.3.0 198.17.255.255 198.20.0.0 203.0.114.0 223.255.255.255"},
	}, {
		name:        "nomasqAllReservedRanges and a list",
		keys:        object{"nomasqAllReservedRanges": true, "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}},
		exempt:      flows{"pod": "10.9.9.9"},
		masqueraded: flows{"pod": "100.64.0.1 192.168.3.3"},
	}, {
		name:        "masqLinkLocal",
		keys:        object{"masqLinkLocal": true},
		exempt:      flows{"pod": "10.9.9.9"},
		masqueraded: flows{"pod": "169.254.0.0 169.254.255.255 1.2.3.4"},
	}, {
		name:        "masqLinkLocal and an exemption", // it removes only the default exemption
		keys:        object{"masqLinkLocal": true, "nonMasqueradeCIDRs": []string{"169.254.5.0/24"}},
		exempt:      flows{"pod": "169.254.5.5"},
		masqueraded: flows{"pod": "169.254.6.6 10.9.9.9"},
	}, {
		name:        "enableIPv6",
		keys:        object{"enableIPv6": true},
		exempt:      flows{"pod": "10.9.9.9"},
		masqueraded: flows{"pod": "1.2.3.4 2001:db8:5::5 fd00:9::9", "vip": "2001:db8:5::5", "transit": "2001:db8:5::5"},
	}, {
		name:        "enableIPv6 false",
		keys:        object{"enableIPv6": false},
		exempt:      flows{"pod": "2001:db8:5::5 fd00:9::9", "vip": "2001:db8:5::5", "transit": "2001:db8:5::5"},
		masqueraded: flows{"pod": "1.2.3.4"},
	}}
}

func scopeCases() []keyCase {
	return []keyCase{{
		name:        "sourceCIDRs of both families",
		keys:        object{"sourceCIDRs": []string{"10.1.0.0/16", "fd00:1::/64"}, "enableIPv6": true},
		exempt:      flows{"pod": "10.9.9.9", "vip": "1.2.3.4 2001:db8:5::5", "transit": "1.2.3.4 2001:db8:5::5"},
		masqueraded: flows{"pod": "1.2.3.4 2001:db8:5::5"},
	}, {
		name:        "sourceCIDRs of one family",
		keys:        object{"sourceCIDRs": []string{"172.20.0.0/24", "10.1.0.0/24"}, "enableIPv6": true},
		exempt:      flows{"pod": "10.9.9.9 2001:db8:5::5 fd00:9::9", "vip": "1.2.3.4 2001:db8:5::5", "transit": "2001:db8:5::5"},
		masqueraded: flows{"pod": "1.2.3.4", "transit": "1.2.3.4"},
	}, {
		name:        "sourceCIDRs of the other family",
		keys:        object{"sourceCIDRs": []string{"fd00:1::/64"}, "enableIPv6": true},
		exempt:      flows{"pod": "1.2.3.4", "vip": "2001:db8:5::5", "transit": "1.2.3.4 2001:db8:5::5"},
		masqueraded: flows{"pod": "2001:db8:5::5"},
	}, {
		name:        "nonMasqueradeSourceCIDRs",
		keys:        object{"nonMasqueradeSourceCIDRs": []string{"10.1.0.0/16", "fd00:1::/64", "192.0.2.77/32"}, "enableIPv6": true},
		exempt:      flows{"pod": "10.9.9.9 1.2.3.4 2001:db8:5::5", "vip": "1.2.3.4"},
		masqueraded: flows{"transit": "1.2.3.4 2001:db8:5::5", "vip": "2001:db8:5::5"},
	}, {
		name:        "nonMasqueradeSourceCIDRs of all sources",
		keys:        object{"nonMasqueradeSourceCIDRs": []string{"0.0.0.0/0"}, "enableIPv6": true},
		exempt:      flows{"pod": "1.2.3.4", "vip": "1.2.3.4", "transit": "1.2.3.4"},
		masqueraded: flows{"pod": "2001:db8:5::5"},
	}, {
		name:        "outputInterfaces",
		keys:        object{"outputInterfaces": []string{"outside"}, "nonMasqueradeCIDRs": []string{}, "enableIPv6": true},
		exempt:      flows{"pod": "10.9.9.9 fd00:9::9", "transit": "10.9.9.9"},
		masqueraded: flows{"pod": "1.2.3.4 2001:db8:5::5", "vip": "1.2.3.4"},
	}, {
		name:        "outputInterfaces with wildcards",
		keys:        object{"outputInterfaces": []string{"eth+", "out+", "l+"}, "nonMasqueradeCIDRs": []string{}, "enableIPv6": true},
		masqueraded: flows{"pod": "10.9.9.9 fd00:9::9 1.2.3.4 2001:db8:5::5"},
	}, {
		name:   "outputInterfaces with prefixes of a name",
		keys:   object{"outputInterfaces": []string{"outsid", "la", "lan0+"}, "enableIPv6": true},
		exempt: flows{"pod": "10.9.9.9 fd00:9::9 1.2.3.4 2001:db8:5::5"},
	}, {
		name: "outputInterfaces and sourceCIDRs",
		keys: object{
			"outputInterfaces": []string{"lan", "outside"}, "sourceCIDRs": []string{"10.1.0.0/16", "192.0.2.0/24", "fd00:1::/64"},
			"nonMasqueradeCIDRs": []string{}, "enableIPv6": true,
		},
		exempt:      flows{"transit": "10.9.9.9 1.2.3.4 2001:db8:5::5", "vip": "2001:db8:5::5"},
		masqueraded: flows{"pod": "10.9.9.9 1.2.3.4 2001:db8:5::5", "vip": "1.2.3.4"},
	}, {
		name:        "masqueradeHost",
		keys:        object{"masqueradeHost": true, "enableIPv6": true},
		exempt:      flows{"vip": "10.9.9.9"},
		masqueraded: flows{"vip": "1.2.3.4 2001:db8:5::5", "pod": "1.2.3.4 2001:db8:5::5", "transit": "1.2.3.4"},
	}, {
		name:        "masqueradeHost false",
		keys:        object{"masqueradeHost": false, "enableIPv6": true},
		exempt:      flows{"vip": "1.2.3.4 2001:db8:5::5 10.9.9.9", "pod": "10.9.9.9"},
		masqueraded: flows{"pod": "1.2.3.4 2001:db8:5::5", "transit": "1.2.3.4 2001:db8:5::5"},
	}, {
		name:        "masqueradeHost false and sourceCIDRs",
		keys:        object{"masqueradeHost": false, "sourceCIDRs": []string{"192.0.2.0/24", "10.1.0.0/16"}, "enableIPv6": true},
		exempt:      flows{"vip": "1.2.3.4", "transit": "1.2.3.4"},
		masqueraded: flows{"pod": "1.2.3.4"},
	}}
}
