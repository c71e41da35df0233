// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"net/netip"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/conntrack"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestWhoOutput compares what is printed about connections with the files in testdata/who.
func TestWhoOutput(t *testing.T) {
	t.Parallel()
	const tcp = unix.IPPROTO_TCP
	found := func(protocol uint8, src, dst, endpoint, seen string) conntrack.Found {
		at := netip.MustParseAddrPort
		return conntrack.Found{
			Original: nfnetlink.Flow{Protocol: protocol, Src: at(src), Dst: at(dst)},
			Reply:    nfnetlink.Flow{Protocol: protocol, Src: at(endpoint), Dst: at(seen)},
		}
	}
	plain, node := "10.88.0.2:51234", found(tcp, "203.0.113.1:22", "192.0.2.7:22", "192.0.2.7:22", "203.0.113.1:22")
	node.SourceLocal, node.Zone = true, 7
	const masquerade, exempt, none = policy.ActionMasquerade, policy.ActionExempt, policy.ActionOutOfScope
	of := func(f conntrack.Found, verdict policy.Action) connection {
		c := connectionOf(f, nil)
		if c.Verdict != verdict {
			c.Chain, c.Verdict = new("PODS"), verdict
		}
		return c
	}
	all := []connection{
		of(found(tcp, plain, "192.0.2.7:443", "192.0.2.7:443", "203.0.113.1:40001"), masquerade),
		of(found(tcp, plain, "10.96.0.1:443", "10.88.1.9:8443", plain), exempt),
		of(found(tcp, "[fd88::2]:1", "[2001:db8::7]:443", "[2001:db8::7]:443", "[fd88::2]:1"), masquerade),
		of(found(tcp, plain, "192.0.2.7:443", "192.0.2.7:443", "203.0.113.1:40001"), exempt),
		of(found(tcp, plain, "192.0.2.7:443", "192.0.2.7:443", "203.0.113.1:40001"), none),
		of(node, none), of(node, masquerade),
	}
	all[0].Pod, all[1].Pod = &diagnose.Pod{Namespace: "prod", Name: "web-0"}, &diagnose.Pod{Namespace: "prod"}
	var text, encoded bytes.Buffer
	for _, c := range all {
		c.text(&text)
	}
	golden.Check(t, filepath.Join("testdata", "who", "text.txt"), text.String())
	if err := (&app{out: &encoded}).print(all[1:3]); err != nil {
		t.Error(err)
	}
	golden.Check(t, filepath.Join("testdata", "who", "json.txt"), encoded.String())
}
