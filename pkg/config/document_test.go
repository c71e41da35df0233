// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Every mistake that an entry can have, with the words that it is refused with.
func TestMistakes(t *testing.T) {
	for _, c := range []struct{ keys, want string }{
		// Keys.
		{`"nonMasqueradeCidrs": []`, `nonMasqueradeCidrs: is not a known key; did you mean nonMasqueradeCIDRs?`},
		{`"masq-chain": "A"`, `masq-chain: is not a known key; did you mean masqChain?`},
		{`"Type": "ip-masq"`, `Type: is not a known key; did you mean type?`},
		{`"resyncInterval": "60s"`, `resyncInterval: is not a known key; remove it`},
		{`"bogus": 1, "bogus": 2`, `bogus: is not a known key; remove it`},
		{`"enableIPv6": true, "enableIPv6": true, "enableIPv6": true`, `enableIPv6: is there twice; write it once`},

		// Lists.
		{`"nonMasqueradeCIDRs": null`, `nonMasqueradeCIDRs: null is no value; write a list such as ["10.0.0.0/8"], or leave the key out`},
		{`"masqueradeCIDRs": "10.0.0.0/8"`, `masqueradeCIDRs: "10.0.0.0/8" is a string; write a list such as ["10.0.0.0/8"]`},

		// Items.
		{`"masqueradeCIDRs": ["10.0.0.0/8", null]`, `masqueradeCIDRs[1]: null is no value; write a string such as "10.0.0.0/8", or drop the item`},
		{`"masqueradeCIDRs": [""]`, `masqueradeCIDRs[0]: is empty; write a CIDR such as 10.0.0.0/8, or drop the item`},
		{`"masqueradeCIDRs": [["10.0.0.0/8"]]`, `masqueradeCIDRs[0]: "[\"10.0.0.0/8\"]" is a list; write a string such as "10.0.0.0/8"`},
		{`"outputInterfaces": [5]`, `outputInterfaces[0]: 5 is a number; write a string such as "eth0"`},
		{`"outputInterfaces": ["eth0", ""]`, `outputInterfaces[1]: is empty; name an interface, or drop the item`},

		// Prefixes.
		{`"nonMasqueradeCIDRs": ["10.0.0.0/8", "1.1.1.1/32", "10.0.1.24/24"]`, `nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?`},
		{`"nonMasqueradeCIDRs": ["\ud800\u0007"]`, `nonMasqueradeCIDRs[0]: "�\a" is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8`},
		{`"sourceCIDRs": ["fd00::/8"]`, `sourceCIDRs[0]: fd00::/8 is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it`},
		// Places are those in the document, whatever was left out before.
		{`"nonMasqueradeCIDRs": ["1.0.0.0/8", "1.0.0.0/8", "10.0.0.0/8"], "masqueradeCIDRs": ["2.0.0.0/8", "2.0.0.0/8", "10.0.0.0/8"]`,
			`masqueradeCIDRs[2]: 10.0.0.0/8 is in nonMasqueradeCIDRs too; remove one of the two`},
		{`"sourceCIDRs": ["1.0.0.0/8", "1.0.0.0/8", "fd00::/8"]`,
			`sourceCIDRs[2]: fd00::/8 is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it`},

		// Booleans.
		{`"enableIPv6": "true"`, `enableIPv6: "true" is a string; write true or false`},
		{`"randomFully": 1`, `randomFully: 1 is a number; write true or false`},
		{`"masqLinkLocalIPv6": null`, `masqLinkLocalIPv6: null is no value; write true or false, or leave the key out`},

		// Ports.
		{`"toPorts": 0`, `toPorts: 0 is a number; write a string such as "1024-29999,32768-65535"`},
		{`"toPorts": "2000-1000"`, `toPorts: 2000-1000 ends before it begins; did you mean 1000-2000?`},

		// The guard's keys.
		{`"guard": "on"`, `guard: on is not one of the choices; write off, count or drop`},
		{`"guard": ""`, `guard: is empty; write off, count or drop, or leave the key out`},
		{`"guard": true`, `guard: true is a boolean; write "off" or "count" or "drop"`},
		{`"bypassMark": 24576`, `bypassMark: 24576 is a number; write a string such as "0x6000"`},
		{`"bypassMark": "0x100000000"`, `bypassMark: 0x100000000 is not a 32-bit mask; write a hexadecimal number such as 0x6000, or 0 for none`},

		// cidrLimit.
		{`"cidrLimit": 0`, `cidrLimit: 0 is not a whole number from 1 to 1000000; write one`},
		{`"cidrLimit": 6.5`, `cidrLimit: 6.5 is not a whole number from 1 to 1000000; write one`},
		{`"cidrLimit": "64"`, `cidrLimit: "64" is a string; write a whole number from 1 to 1000000`},
		{`"cidrLimit": 2, "nonMasqueradeCIDRs": ["1.0.0.0/8", "2.0.0.0/8"], "masqueradeCIDRs": ["3.0.0.0/8"]`,
			`cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 3 entries together, more than the 2 allowed; remove some or raise cidrLimit`},

		// Chains and backends.
		{`"masqChain": ""`, `masqChain: is empty; leave the key out for IP-MASQ-AGENT`},
		{`"masqChain": "POSTROUTING"`, `masqChain: POSTROUTING is the name of a built-in chain or target; choose one of your own, such as IP-MASQ-AGENT`},

		// dataDir.
		{`"dataDir": "state"`, `dataDir: state is relative; write an absolute path such as /var/lib/cni/ip-masq`},
		{`"dataDir": ""`, `dataDir: is empty; write an absolute path such as /var/lib/cni/ip-masq, or leave the key out`},
		{`"dataDir": "/srv/ip masq"`, `dataDir: "/srv/ip masq" holds " "; write a path of letters, digits and /._-+@, such as /var/lib/cni/ip-masq`},
		{`"dataDir": "/` + strings.Repeat("a", 200) + `"`,
			`dataDir: /` + strings.Repeat("a", 200) + ` has 201 bytes; write a path of at most 200`},
		{`"dataDir": 1`, `dataDir: 1 is a number; write a string such as "/var/lib/cni/ip-masq"`},
	} {
		t.Run(c.keys[:min(len(c.keys), 60)], func(t *testing.T) {
			e, err := ReadNetconf(entryWith(c.keys)).Entry()
			policytest.CheckMessage(t, err)
			if err.Error() != c.want {
				t.Errorf("message\n%s\nwant\n%s", err, c.want)
			}
			var field *policy.FieldError
			if !errors.As(err, &field) {
				t.Errorf("%T holds no FieldError", err)
			}
			if errors.Is(err, ErrNotJSON) {
				t.Error("is an ErrNotJSON, but it is JSON")
			}
			if e.Network != "podnet" {
				t.Errorf("the refused entry does not tell its network, but %q", e.Network)
			}
		})
	}
}

func TestMistakesInRuntimeKeys(t *testing.T) {
	for _, c := range []struct{ doc, want string }{
		{`{}`, `name: is missing; name the network, such as "podnet"`},
		{`{"name": ""}`, `name: is empty; name the network, such as "podnet"`},
		{`{"name": "a b"}`, `name: "a b" is not the name of a network; write letters, digits, '_', '.' and '-', the first a letter or a digit`},
		{`{"name": ".."}`, `name: .. is not the name of a network; write letters, digits, '_', '.' and '-', the first a letter or a digit`},
		{`{"name": "a", "name": "a"}`, `name: is there twice; write it once`},
		{`{"name": "a", "cniVersion": 1}`, `cniVersion: 1 is a number; write a string such as "1.0.0"`},
	} {
		_, err := ReadNetconf([]byte(c.doc)).Entry()
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: message\n%v\nwant\n%s", c.doc, err, c.want)
		}
	}
}
