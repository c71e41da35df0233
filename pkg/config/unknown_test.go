// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
)

// A key is proposed only if it means the same. What looks alike and means something else, or the opposite, is not.
func TestUnknownKeys(t *testing.T) {
	for unknown, want := range map[string]string{
		// Keys of forks of the agents and of other projects.
		"NonMasqueradeSrcCIDRs":        "did you mean nonMasqueradeSourceCIDRs?",
		"nonMasqueradeSrcCIDRs":        "did you mean nonMasqueradeSourceCIDRs?",
		"forceMasqueradeCIDRs":         "did you mean masqueradeCIDRs?",
		"masqRandomFully":              "did you mean randomFully?",
		"outputInterface":              "did you mean outputInterfaces?",
		"outputAddress":                "did you mean outputAddresses?",
		"outputAddressIPv6":            "did you mean outputAddresses?",
		"ipv4-native-routing-cidr":     "did you mean nonMasqueradeCIDRs?",
		"egress-masquerade-interfaces": "did you mean outputInterfaces?",
		"ipMasqBackend":                "did you mean backend?",

		// Slips of the pen.
		"nonMasqeuradeCIDRs":     "did you mean nonMasqueradeCIDRs?",
		"nonMasqueradeCIDR":      "did you mean nonMasqueradeCIDRs?",
		"noMasqueradeCIDRs":      "did you mean nonMasqueradeCIDRs?",
		"masqueradCIDR":          "did you mean masqueradeCIDRs?",
		"nonMasqueradeSorceCIDR": "did you mean nonMasqueradeSourceCIDRs?",
		"podCIDR":                "did you mean podCIDRs?",
		"guards":                 "did you mean guard?",
		"enable_ipv6":            "did you mean enableIPv6?",

		// A word, a digit or a negation makes another key of it.
		"nodeCIDRs":                "remove it",
		"inputInterfaces":          "remove it",
		"enableIPv4":               "remove it",
		"masqAllReservedRanges":    "remove it",
		"nonMasqueradePodCIDRs":    "remove it",
		"nonMasqueradeInterfaces":  "remove it",
		"masqueradeNamespaces":     "remove it",
		"masqueradeSourceCIDRs":    "remove it",
		"ipMasqRandomFullyDisable": "remove it",
		"masqLinkLocalIPv4":        "did you mean masqLinkLocal?",
	} {
		_, err := ReadNetconf(entryWith(fmt.Sprintf("%q: []", unknown))).Entry()
		policytest.WantError(t, err, "FILE", unknown+": is not a known key; "+want)

		var s Settings
		err = s.parse("FILE", fmt.Appendf(nil, "[agent]\n%q = []", unknown))
		policytest.WantError(t, err, "FILE", "FILE:2: agent."+unknown+": is not a known key; "+want)
	}
}

// The mistake is the wrapping, and not each key of it.
func TestWrappedKeys(t *testing.T) {
	const file = "write only the text of the file in it, without data and the name of the file"
	for _, c := range []struct{ keys, want string }{
		{`"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "ip-masq-agent"}, "data": {"config": "masqLinkLocal: true"}`,
			"apiVersion: is not a known key; this is a whole ConfigMap; " + file},
		{`"data": {"config": "masqLinkLocal: true"}, "metadata": {}`,
			"data: is not a known key; this is a whole ConfigMap; " + file},
		{`"data": {"config": "nonMasqueradeCIDRs: []"}`, "data: is not a known key; this is a whole ConfigMap; " + file},
		{`"apiVersion": "v1", "kind": "List", "items": [{"kind": "ConfigMap", "data": {"config": "nonMasqueradeCIDRs: []"}}]`,
			"apiVersion: is not a known key; this is a list of objects; write only the text of the file in its ConfigMap, without data and the name of the file"},
		{`"ip-masq-agent": "nonMasqueradeCIDRs:\n  - 10.0.0.0/8\n"`,
			"ip-masq-agent: is not a known key; write the keys inside it one level up, without ip-masq-agent"},
		{`"ip-masq-agent": "{\"bogus\": 1, \"masqLinkLocal\": true}"`,
			"ip-masq-agent: is not a known key; write the keys inside it one level up, without ip-masq-agent"},
		{`"mine": {"nonMasqueradeCIDRs": []}, "note": "nonMasqueradeCIDRs of our network", "delegate": {"type": "bridge", "ipam": {}}`,
			"mine: is not a known key; write the keys inside it one level up, without mine; note: is not a known key; remove it; delegate: is not a known key; remove it"},
		{`"config": {"nonMasqueradeCIDRs": []}`, "config: is not a known key; write the keys inside it one level up, without config"},
		{`"config": "nonMasqueradeCIDRs: []\nmasqlinklocal: true"`, "config: is not a known key; write the keys inside it one level up, without config"},
		{`"config": {"bogus": true}`, "config: is not a known key; remove it"},
		{`"config": true, "data": {}`, "config: is not a known key; remove it; data: is not a known key; remove it"},
	} {
		_, err := ReadNetconf(entryWith(c.keys)).Entry()
		policytest.WantError(t, err, "FILE", c.want)
	}
	var s Settings
	for doc, want := range map[string]string{
		"[config]\nresync_interval = '60s'":       "FILE:1: config: is not a known key; write the keys inside it one level up, without config",
		"kind = 'ConfigMap'\n[data]\nconfig = ''": "FILE:1: kind: is not a known key; this is a whole ConfigMap; " + file,
	} {
		policytest.WantError(t, s.parse("FILE", []byte(doc)), "FILE", want)
	}
}

// The search is not wasted on a long name.
func FuzzSynonym(f *testing.F) {
	for _, name := range []string{"", "a.b.", "nonMasqueradeCIDR", "\xff", strings.Repeat("é", 99), "agent.masqChain"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		s := DefaultSettings()
		if near := synonym(name, s.keys()); near != "" && isNegated(fold(near)) != isNegated(fold(name)) && nameOfOthers(fold(name)) == "" {
			t.Errorf("%s is proposed for %q", near, name)
		}
	})
}

// A value with very many levels is not searched whole: that took 6 s for one of 1 MiB.
func TestDeepUnknownKey(t *testing.T) {
	const levels = 9000
	began := time.Now()
	_, err := ReadNetconf(entryWith(`"x": ` + strings.Repeat(`{"x": `, levels) + `{"nonMasqueradeCIDRs": []}` + strings.Repeat("}", levels))).Entry()
	policytest.WantError(t, err, "FILE", "x: is not a known key; remove it")
	if took := time.Since(began); took > 300*time.Millisecond {
		t.Errorf("it took %v", took)
	}
}
