// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestValidateChainName(t *testing.T) {
	const (
		runes   = "may hold only letters, digits, '_', '.' and '-'"
		first   = "must begin with a letter or a digit"
		builtIn = "is the name of a built-in chain or target; choose one of your own, such as IP-MASQ-AGENT"
		others  = " of others; choose another"
	)
	for _, tt := range []struct{ name, want string }{
		{"IP-MASQ-AGENT", ""},
		{"a", ""},
		{"7.of_9", ""},
		{strings.Repeat("x", 24), ""},
		{"RETURNED", ""},
		{"KUBE", ""},
		{"MY-CNI-CHAIN", ""},
		{"", "is empty; leave the key out for IP-MASQ-AGENT"},
		{strings.Repeat("x", 25), "has 25 characters; at most 24 are possible"},
		{"has space", runes},
		{"semi;colon", runes},
		{"new\nline", runes},
		{"straße", runes},
		{strings.Repeat("ß", 24), runes},
		{"ＲＥＴＵＲＮ", runes},
		{"\xff", runes},
		{"-j", first},
		{".x", first},
		{"_x", first},
		{"POSTROUTING", builtIn},
		{"postrouting", builtIn},
		{"RETURN", builtIn},
		{"Masquerade", builtIn},
		{"snat", builtIn},
		{"KUBE-POSTROUTING", "lies in the name space KUBE-" + others},
		{"kube-x", "lies in the name space KUBE-" + others},
		{"CNI-HOSTPORT-MASQ", "lies in the name space CNI-" + others},
	} {
		wantError(t, tt.name, policy.ValidateChainName(tt.name), tt.want)
	}
}

// A name that is accepted needs no quoting anywhere and is never the target of
// a -j by itself.
func TestAcceptedChainNamesArePlain(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[A-Za-z0-9_.\-+!/ ]{0,26}`).Draw(t, "name")
		if policy.ValidateChainName(name) != nil {
			return
		}
		if len(name) > 24 || name == "" || strings.Trim(name, "_.-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") != "" || strings.HasPrefix(name, "-") {
			t.Fatalf("%q was accepted", name)
		}
	})
}

func TestDefaultChainIsValid(t *testing.T) {
	if err := policy.ValidateChainName(policy.DefaultChain); err != nil {
		t.Error(err)
	}
}
