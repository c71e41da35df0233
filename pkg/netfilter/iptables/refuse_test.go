// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// dropNetAdmin takes CAP_NET_ADMIN from the thread of the test, which ends with it.
func dropNetAdmin(t *testing.T) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	assert.NoError(t, unix.Capget(&header, &data[0]))
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	assert.NoError(t, unix.Capset(&header, &data[0]))
}

// TestRefusedByKernel: a program ends with the status of what may pass. The kernel says whether it does, whatever the
// program prints.
func TestRefusedByKernel(t *testing.T) {
	for name, tc := range map[string]struct {
		variant string
		before  func(*testing.T)
		want    error
	}{
		"nft, nothing is wrong":         {variant: "nft", want: netfilter.ErrBusy},
		"nft, without the capability":   {variant: "nft", before: dropNetAdmin, want: netfilter.ErrUnusable},
		"legacy, nothing is wrong":      {variant: "legacy", want: netfilter.ErrBusy},
		"legacy, no place for the lock": {variant: "legacy", before: noPlaceForLock, want: netfilter.ErrUnusable},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			// A table, without which legacy lists nothing.
			shell(t, "iptables-legacy -t nat -L")
			path := pathWith(t, map[string]string{"iptables-" + tc.variant: "[ \"$1\" != --version ] || exec echo iptables v1.8.9\nexit 4"})
			d := New(path)
			if tc.before != nil {
				tc.before(t)
			}
			_, err := d.Probe(t.Context(), tc.variant)
			for _, verdict := range []error{netfilter.ErrUnusable, netfilter.ErrBusy} {
				if errors.Is(err, verdict) != errors.Is(tc.want, verdict) {
					t.Errorf("got %v, want %v", err, tc.want)
				}
			}
		})
	}
}

// noPlaceForLock makes the xtables lock a file that cannot be created.
func noPlaceForLock(t *testing.T) {
	t.Helper()
	_ = os.Remove(lockFile)
	assert.NoError(t, os.Symlink("/nowhere/lock", lockFile))
	t.Cleanup(func() { assert.NoError(t, os.Remove(lockFile)) })
}

// TestExtensionsAsked: the kernel accepts what it is asked about rules of every kind, and refuses an extension that it
// does not have.
func TestExtensionsAsked(t *testing.T) {
	isolate(t)
	p := basic("X")
	p.ToPorts.Value = policy.Ports{{First: 1024, Last: 2047}, {First: 4096, Last: 8191}}
	p.Outputs = []policy.OutputAddress{
		{Interface: "eth0", Address: netip.MustParseAddr("192.0.2.1")},
		{Interface: "eth0", Address: netip.MustParseAddr("2001:db8::1")},
	}
	chains := desired(policy.Owner{}, p).Chains
	const all = 5 // comment, addrtype, MASQUERADE, statistic, SNAT
	for _, f := range policy.Families() {
		own := netfilter.ChainsOf(policy.Ruleset{Chains: chains}, f)
		assert.Equal(t, "extensions", len(extensions(f, own)), all)
		r := &nftReader{}
		assert.NoError(t, r.refuses(f, own))
		b := extensionBatch(f, own)
		b.AddRule(netfilter.LinkOf(f), Table, "ip-masq-check", []nfnetlink.Expr{nfnetlink.Match{Xt: "none-such", Info: make([]byte, 8)}}, "")
		if err := r.conn.Check(b); !lasts(err) {
			t.Errorf("%s: got %v", f, err)
		}
		if tables, err := r.conn.Tables(netfilter.LinkOf(f)); err != nil || len(tables) > 0 {
			t.Errorf("%s: tables %v, %v", f, tables, err)
		}
	}
}
