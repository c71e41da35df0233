// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestSchemas: an older version must be able to tell that a document has something that it does not know. A
// key in the golden file never gets another number, and -update adds one only with the number that comes
// next.
func TestSchemas(t *testing.T) {
	const file = "testdata/schemas.txt"
	known := assert.Must(os.ReadFile(file))(t)
	greatest, lines := 0, []string{}
	for line := range strings.Lines(string(known)) {
		n := assert.Must(strconv.Atoi(strings.Fields(line)[0]))(t)
		greatest, lines = max(greatest, n), append(lines, line)
	}
	for _, k := range append(policytest.Keys(), policy.Key{Name: "(no key)", Schema: otherSchema}) {
		if line := fmt.Sprintf("%d %s\n", k.Schema, k.Name); !slices.Contains(lines, line) {
			if lines = append(lines, line); k.Schema != greatest+1 {
				t.Fatalf("%s has schema %d, and the next one is %d", k.Name, k.Schema, greatest+1)
			}
		}
	}
	golden.Check(t, file, strings.Join(lines, ""))
}

// The form of documents is a promise to other versions: a change of these texts
// needs a new Schema.
func TestFormOfDocuments(t *testing.T) {
	data := assert.Must(encode(document{Schema(), policy.Source{
		ID: policy.SourceID{Kind: policy.Network, Name: "podnet"},
		Policy: policy.SourcePolicy{
			Chain: "IP-MASQ-AGENT", NonMasqueradeCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			MasqueradeCIDRs: []netip.Prefix{}, MasqLinkLocal: new(true),
			ToPorts:  &policy.Ports{{First: 1024, Last: 2047}},
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, Guard: policy.GuardDrop,
			StaleConnections: policy.KeepConnections, EnforceExempt: new(true), BypassMark: new(policy.Mark(0x4000)),
		},
		Order: 3, PodSubnets: []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24")},
	}}))(t)
	want := fmt.Sprintf(`{"schema":%d,"source":{"kind":"network","name":"podnet"},"policy":{"masqChain":"IP-MASQ-AGENT",`+
		`"nonMasqueradeCIDRs":["10.0.0.0/8"],"masqueradeCIDRs":[],"masqLinkLocal":true,"toPorts":"1024-2047",`+
		`"podCIDRs":["10.1.0.0/16"],"guard":"drop","staleConnections":"keep","enforceExempt":true,"bypassMark":"0x4000"},`+
		`"order":3,"podSubnets":["10.1.2.0/24"]}`, Schema())
	assert.Equal(t, "document", string(data), want)
	const name = "3d367f84a9b64b38f757efb74746263523d9e17728522033a6aa42c03ad06603.json"
	assert.Equal(t, "name of the document", nameOf(policy.SourceID{Kind: policy.Network, Name: "podnet"}), name)
	before := []policy.Source{{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: policy.SourcePolicy{Chain: "A"}}}
	data = assert.Must(encode(recordDocument{Schema(), Record{
		Boot: "b", Chains: []OwnedChain{
			{"IP-MASQ-AGENT", policy.IPv4, policy.IPTables, "legacy", true}, {"A", policy.IPv6, policy.NFTables, "", false},
		},
		Resets: []Reset{{At: 5}, {At: 6, Before: []policy.Source{}}, {At: 7, Before: before}}, LastReset: 4,
	}}))(t)
	record := fmt.Sprintf(`{"schema":%d,"boot":"b","chains":[{"chain":"IP-MASQ-AGENT","family":"ipv4","backend":"iptables",`+
		`"variant":"legacy","stuck":true},{"chain":"A","family":"ipv6","backend":"nftables"}],`+
		`"resets":[{"at":5},{"at":6,"before":[]},{"at":7,"before":[{"source":{"kind":"agent-files"},"policy":{"masqChain":"A"}}]}],"lastReset":4}`, Schema())
	assert.Equal(t, "record", string(data), record)
}

func FuzzDocument(f *testing.F) {
	ours := fmt.Sprintf(`{"schema":%d`, Schema())
	for _, s := range []string{
		ours + `,"source":{"kind":"network","name":"net"},"policy":{"masqChain":"POD-MASQ"}}`,
		ours + `,"source":{"kind":"agent-files"},"policy":{"masqChain":"A","backend":"auto","nonMasqueradeCIDRs":["10.0.0.0/8"],` +
			`"masqueradeCIDRs":[],"enableIPv6":true,"sourceCIDRs":["fd00::/8"],"outputInterfaces":["eth+"],"toPorts":"1-2,3",` +
			`"podCIDRs":["fd00:1::/64"],"guard":"count","staleConnections":"reset","enforceExempt":false,"bypassMark":"0"},"superseded":true,"order":-4}`,
		ours + `,"source":{"kind":"network","name":"net"},"policy":{"masqChain":"A"},"podSubnets":["10.1.2.0/24","fd00:1::/64"]}`,
		ours + `,"boot":"b","chains":[{"chain":"A","family":"ipv4","backend":"iptables","variant":"nft"}]}`,
		ours + `,"boot":"b","resets":[{"at":5,"before":[{"source":{"kind":"agent-files"},"policy":{"masqChain":"A"}}]},{"at":6}],"lastReset":4}`,
		fmt.Sprintf(`{"schema":%d,"source":[]}`, Schema()+1),
		`{"a":{},"schema":99999999999999999999}`,
		ours + `,"source":{"kind":"network","name":"net"},"policy":{"masqChain":"A","nonMasqueradeCIDRs":[null,"::ffff:0:0/96"]}}`,
		ours + `,"schema":2,"source":null}`,
		``, `{`, `[]`, ours + `}{`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var named document
		_ = json.Unmarshal(data, &named) // only to give the document its proper name
		name := nameOf(named.ID)
		if c, err := decodeSource(data, name); err == nil {
			again, err := encode(document{Schema(), c})
			if err != nil {
				t.Fatalf("%+v was read and cannot be written: %v", c, err)
			}
			if back, err := decodeSource(again, name); err != nil || !reflect.DeepEqual(back, c) {
				t.Fatalf("%+v became %+v, %v", c, back, err)
			}
			if _, err := decodeSource(data, nameOf(policy.SourceID{Kind: "none"})); err == nil {
				t.Fatal("read from a file that is not its own")
			}
			// Readers of a document rely on it.
			policy.Desired(policy.Merge([]policy.Source{c}), policy.Layout{Sets: true}, policy.Owner{})
		} else if schema := schemaOf(data); errors.Is(err, ErrNewer) != (schema > Schema()) {
			t.Fatalf("schema %d: %v", schema, err)
		}
		if r, err := decode[recordDocument](data); err == nil {
			again, err := encode(r)
			if err != nil {
				t.Fatalf("%+v was read and cannot be written: %v", r, err)
			}
			if back, err := decode[recordDocument](again); err != nil || back.Boot != r.Boot || !slices.Equal(back.Chains, r.Chains) ||
				back.LastReset != r.LastReset || !reflect.DeepEqual(back.Resets, r.Resets) {
				t.Fatalf("%+v became %+v, %v", r, back, err)
			}
		}
	})
}
