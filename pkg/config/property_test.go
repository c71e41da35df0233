// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// encode writes an entry as a conflist would have it.
func encode(t testing.TB, e Entry) []byte {
	t.Helper()
	statement, err := json.Marshal(e.Policy)
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := json.Unmarshal(statement, &doc); err != nil {
		t.Fatal(err)
	}
	doc["name"], doc["cniVersion"], doc["type"] = e.Network, e.CNIVersion, PluginType
	doc["requireAgentConfig"], doc["cidrLimit"], doc["dataDir"] = e.RequireAgentConfig, e.CIDRLimit, e.DataDir
	text, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// checkReencoded parses what an accepted entry is written as.
func checkReencoded(t testing.TB, e Entry) {
	t.Helper()
	again, err := ParseEntry(encode(t, e))
	if err != nil {
		t.Fatalf("an accepted entry is refused once it is encoded again: %v\n%s", err, encode(t, e))
	}
	if diff := cmp.Diff(e, again, comparePrefixes); diff != "" {
		t.Errorf("entry changed when it was encoded again (-before +after):\n%s", diff)
	}
}

func genPrefix(allowIPv6 bool) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		size := 4
		if allowIPv6 && rapid.Bool().Draw(t, "ipv6") {
			size = 16
		}
		bytes := rapid.SliceOfN(rapid.Byte(), size, size).Draw(t, "address")
		a, _ := netip.AddrFromSlice(bytes)
		return netip.PrefixFrom(a, rapid.IntRange(0, 8*size).Draw(t, "bits")).Masked()
	}).Filter(func(p netip.Prefix) bool { return !p.Addr().Is4In6() })
}

func genStatement(t *rapid.T) policy.SourcePolicy {
	flag := rapid.Ptr(rapid.Bool(), true)
	s := policy.SourcePolicy{
		Chain:                   rapid.StringMatching(`[a-z][A-Za-z0-9_.\-]{0,23}`).Filter(isChainName).Draw(t, "chain"),
		Backend:                 rapid.SampledFrom([]policy.Backend{"", policy.Auto, policy.IPTables, policy.NFTables}).Draw(t, "backend"),
		NomasqAllReservedRanges: flag.Draw(t, "nomasqAllReservedRanges"),
		MasqLinkLocal:           flag.Draw(t, "masqLinkLocal"),
		MasqLinkLocalIPv6:       flag.Draw(t, "masqLinkLocalIPv6"),
		EnableIPv6:              flag.Draw(t, "enableIPv6"),
		MasqueradeHost:          flag.Draw(t, "masqueradeHost"),
		RandomFully:             flag.Draw(t, "randomFully"),
	}
	// A list: not stated, empty, or of different items.
	prefix := genPrefix(s.EnableIPv6 != nil && *s.EnableIPv6)
	cidrs := func(label string) []netip.Prefix {
		if !rapid.Bool().Draw(t, label+" stated") {
			return nil
		}
		return append([]netip.Prefix{}, rapid.SliceOfNDistinct(prefix, 0, 9, rapid.ID).Draw(t, label)...)
	}
	s.NonMasqueradeCIDRs, s.MasqueradeCIDRs = cidrs("nonMasqueradeCIDRs"), cidrs("masqueradeCIDRs")
	s.MasqueradeCIDRs = slices.DeleteFunc(s.MasqueradeCIDRs, func(p netip.Prefix) bool { return slices.Contains(s.NonMasqueradeCIDRs, p) })
	s.SourceCIDRs, s.NonMasqueradeSourceCIDRs = cidrs("sourceCIDRs"), cidrs("nonMasqueradeSourceCIDRs")
	if rapid.Bool().Draw(t, "outputInterfaces stated") {
		name := rapid.StringMatching(`[a-z<>&'][a-z0-9.<>&']{0,13}\+?`)
		s.OutputInterfaces = append([]string{}, rapid.SliceOfNDistinct(name, 0, 5, rapid.ID).Draw(t, "outputInterfaces")...)
	}
	if rapid.Bool().Draw(t, "toPorts stated") {
		ends := rapid.SliceOfNDistinct(rapid.Uint16Range(1, 65535), 0, 12, rapid.ID).Draw(t, "toPorts")
		slices.Sort(ends)
		ports := policy.Ports{}
		for pair := range slices.Chunk(ends, 2) {
			ports = append(ports, policy.PortRange{First: pair[0], Last: pair[len(pair)-1]})
		}
		s.ToPorts = &ports
	}
	return s
}

func isChainName(s string) bool { return policy.ValidateChainName(s) == nil }

func TestStatementSurvivesEncoding(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		checkReencoded(t, Entry{
			Network: "podnet", CNIVersion: "1.1.0", Policy: genStatement(rt),
			RequireAgentConfig: rapid.Bool().Draw(rt, "requireAgentConfig"),
			CIDRLimit:          rapid.IntRange(18, policy.MaxCIDRLimit).Draw(rt, "cidrLimit"),
			DataDir:            "/srv/" + rapid.StringMatching(`[a-zé<&> ]{1,20}`).Draw(rt, "dataDir"),
		})
	})
}

// What a list repeats is dropped, and what remains is in the written order.
func TestListsKeepTheirOrder(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		written := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 0, 12).Draw(rt, "written")
		text, err := json.Marshal(written)
		if err != nil {
			t.Fatal(err)
		}
		e, err := ParseEntry(entryWith(`"outputInterfaces":` + string(text)))
		if err != nil {
			t.Fatal(err)
		}
		want := []string{}
		for i, s := range written {
			if slices.Index(written, s) == i {
				want = append(want, s)
			}
		}
		if diff := cmp.Diff(want, e.Policy.OutputInterfaces); diff != "" {
			t.Errorf("%q (-want +got):\n%s", written, diff)
		}
	})
}

// elements does what the decoder of the standard library does.
func checkElements(t testing.TB, doc []byte) {
	t.Helper()
	var items []json.RawMessage
	if json.Unmarshal(doc, &items) == nil && items != nil {
		if diff := cmp.Diff(items, append([]json.RawMessage{}, Elements(trimmed(doc))...)); diff != "" {
			t.Errorf("items of %q (-want +got):\n%s", doc, diff)
		}
	}
	var values map[string]json.RawMessage
	if json.Unmarshal(doc, &values) == nil && values != nil {
		got := map[string]json.RawMessage{}
		parts := Elements(trimmed(doc))
		for pair := range slices.Chunk(parts, 2) {
			name, isString := StringValue(pair[0])
			if !isString {
				t.Fatalf("%q has a key that is no string: %q", doc, pair[0])
			}
			got[name] = pair[1]
		}
		if diff := cmp.Diff(values, got); diff != "" {
			t.Errorf("members of %q (-want +got):\n%s", doc, diff)
		}
	}
}
