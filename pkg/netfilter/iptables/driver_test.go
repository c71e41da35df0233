// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// pathWith returns a PATH of one directory that holds programs under the given
// names: each is "nft" or "legacy", for that variant, or else a shell script.
func pathWith(t *testing.T, programs map[string]string) string {
	t.Helper()
	root := tree(t, "sbin dir 755")
	for name, what := range programs {
		path := filepath.Join(root, "sbin", name)
		var err error
		if what == netfilter.VariantNFT || what == netfilter.VariantLegacy {
			err = os.Symlink(multi(t, what), path)
		} else {
			err = os.WriteFile(path, []byte("#!/bin/sh\n"+what), 0o755)
		}
		assert.NoError(t, err)
	}
	return filepath.Join(root, "sbin")
}

// multi returns the program that is all programs of a variant, by its name.
func multi(t *testing.T, variant string) string {
	t.Helper()
	path, err := exec.LookPath("iptables-" + variant)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	assert.NoError(t, err)
	return path
}

// shell runs commands in the network namespace of the test.
func shell(t *testing.T, commands ...string) {
	t.Helper()
	for _, c := range commands {
		assert.Output(t, exec.Command("/bin/sh", "-c", c))
	}
}

func TestProbe(t *testing.T) {
	both := map[string]string{"iptables": "nft", "iptables-nft": "nft", "iptables-legacy": "legacy"}
	for _, tc := range []struct {
		name     string
		programs map[string]string
		before   []string
		variant  string
		want     netfilter.Choice
		fails    []string
	}{
		{name: "nothing in use, both there", programs: both, want: netfilter.Choice{Variant: "nft"}},
		{name: "plain one decides", programs: map[string]string{"iptables": "legacy", "iptables-nft": "nft", "iptables-legacy": "legacy"},
			want: netfilter.Choice{Variant: "legacy"}},
		{name: "plain one alone, nft", programs: map[string]string{"iptables": "nft"}, want: netfilter.Choice{Variant: "nft"}},
		{name: "plain one alone, legacy", programs: map[string]string{"iptables": "legacy"}, want: netfilter.Choice{Variant: "legacy"}},
		{name: "no plain one", programs: map[string]string{"iptables-legacy": "legacy", "iptables-nft": "nft"}, want: netfilter.Choice{Variant: "nft"}},
		{name: "legacy alone", programs: map[string]string{"iptables-legacy": "legacy"}, want: netfilter.Choice{Variant: "legacy"}},
		{name: "variant asked for", programs: both, variant: "legacy", want: netfilter.Choice{Variant: "legacy"}},
		{name: "kubelet is on nft", programs: map[string]string{"iptables": "legacy", "iptables-nft": "nft"},
			before: []string{"iptables-nft -t mangle -N KUBE-KUBELET-CANARY"}, want: netfilter.Choice{Variant: "nft"}},
		{name: "kubelet is on nft for IPv6", programs: map[string]string{"iptables": "legacy", "iptables-nft": "nft"},
			before: []string{"ip6tables-nft -t mangle -N KUBE-IPTABLES-HINT"}, want: netfilter.Choice{Variant: "nft"}},
		{name: "kubelet is on legacy", programs: both, before: []string{"ip6tables-legacy -t mangle -N KUBE-IPTABLES-HINT"},
			want: netfilter.Choice{Variant: "legacy"}},
		{name: "kubelet is on what is not installed", programs: map[string]string{"iptables": "nft"},
			before: []string{"iptables-legacy -t mangle -N KUBE-IPTABLES-HINT"},
			fails:  []string{"iptables (legacy) cannot keep rules on this host", "sbin/iptables is of the nft variant; install the legacy one too"}},
		{name: "old", programs: map[string]string{"iptables": "test \"$1\" != --version || echo iptables v1.6.1\n"},
			want: netfilter.Choice{Variant: "legacy"}},
		{name: "none", fails: []string{"find iptables or iptables-nft or iptables-legacy: file does not exist in PATH", "install iptables"}},
		{name: "none of the variant", programs: map[string]string{"iptables": "nft"}, variant: "legacy",
			fails: []string{"find iptables-legacy:", "is of the nft variant"}},
		{name: "refused", programs: map[string]string{"iptables": `case $1 in
				--version) echo "iptables v1.8.9 (nf_tables)";;
				*) echo "iptables: Could not fetch rule set generation id: Permission denied (you must be root)" >&2; exit 4;;
			esac`}, fails: []string{"exit status 4: iptables: Could not fetch", "it needs CAP_NET_ADMIN"}},
		{name: "does not run", programs: map[string]string{"iptables": "exit 7"}, fails: []string{"sbin/iptables: exit status 7"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			shell(t, tc.before...)
			d := New(pathWith(t, tc.programs))
			got, err := d.Probe(t.Context(), tc.variant)
			if len(tc.fails) > 0 {
				if !errors.Is(err, netfilter.ErrUnusable) {
					t.Fatalf("got %v, %v", got, err)
				}
				assert.ErrorContains(t, err, tc.fails...)
				return
			}
			tc.want.Backend = policy.IPTables
			if err != nil || got != tc.want {
				t.Errorf("got %v, %v; want %v", got, err, tc.want)
			}
			for _, table := range []string{Table, "filter"} {
				// Who asks may not want to write at all.
				used, err := legacyInUse(policy.IPv4, table)
				if err != nil || used {
					t.Errorf("table %s of iptables-legacy is in use: %v, %v", table, used, err)
				}
			}
		})
	}
}

// works is a driver of a backend that works.
type works struct{ netfilter.Driver }

func (works) FindChain(context.Context, string) ([]netfilter.Choice, error) { return nil, nil }
func (works) Probe(context.Context, string) (netfilter.Choice, error)       { return netfilter.Choice{}, nil }
func (works) HasKubeProxy() bool                                            { return false }

// TestChooseBusy: a program that is busy says nothing about the host, so auto chooses no other backend.
func TestChooseBusy(t *testing.T) {
	for name, fails := range map[string]string{
		"busy":   `echo "iptables: Resource temporarily unavailable" >&2; exit 4`,
		"killed": "kill -9 $$",
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			path := pathWith(t, map[string]string{"iptables": `[ "$1" != --version ] || exec echo "iptables v1.8.9 (nf_tables)"; ` + fails})
			c, err := netfilter.Drivers{New(path), works{}}.Choose(t.Context(), "X", policy.Auto, func(netfilter.Choice) error { return nil })
			if !errors.Is(err, netfilter.ErrBusy) || errors.Is(err, netfilter.ErrUnusable) {
				t.Errorf("got %v, %v", c, err)
			}
		})
	}
}

// TestOwned: a chain is found by its comment, and can be removed.
func TestOwned(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("A"), basic("B")))
		n.iptables(policy.IPv6, "-E B C")
		n.iptables(policy.IPv4, "-N OTHER")
		n.iptables(policy.IPv4, "-A POSTROUTING -j OTHER")
		owned := func() (chains []policy.ChainFamily) {
			all := assert.Must(n.driver.Owned(n.Context()))(n)
			for _, c := range all {
				if c.Choice != n.choice || c.Owner != policy.OwnedBy(owner) {
					n.Errorf("got %v", c)
				}
				chains = append(chains, c.ChainFamily)
			}
			return chains
		}
		want := []policy.ChainFamily{{Chain: "A", Family: policy.IPv4}, {Chain: "B", Family: policy.IPv4}, {Chain: "A", Family: policy.IPv6}, {Chain: "C", Family: policy.IPv6}}
		assert.Equal(n, "owned", owned(), want)
		if err := n.Remove(n.Context(), want, nil); err != nil || len(owned()) > 0 {
			n.Errorf("%v; left: %v", err, owned())
		}
	})
}

func TestFindChain(t *testing.T) {
	nft := netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	legacy := netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
	for _, tc := range []struct {
		name   string
		before []string
		want   []netfilter.Choice
	}{
		{name: "nothing"},
		{name: "chains of other programs", before: []string{"iptables-nft -t nat -N OTHER", "iptables-legacy -t nat -N OTHER"}},
		{name: "in another table", before: []string{"iptables-nft -N X", "iptables-legacy -t mangle -N X"}},
		{name: "nft", before: []string{"iptables-nft -t nat -N X"}, want: []netfilter.Choice{nft}},
		{name: "nft for IPv6", before: []string{"ip6tables-nft -t nat -N X"}, want: []netfilter.Choice{nft}},
		{name: "legacy", before: []string{"iptables-legacy -t nat -N X"}, want: []netfilter.Choice{legacy}},
		{name: "legacy for IPv6", before: []string{"ip6tables-legacy -t nat -N X"}, want: []netfilter.Choice{legacy}},
		{name: "both", before: []string{"iptables-nft -t nat -N X", "iptables-legacy -t nat -N X"}, want: []netfilter.Choice{nft, legacy}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			shell(t, tc.before...)
			got, err := New("/nowhere").FindChain(t.Context(), "X")
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
			if len(tc.before) > 0 {
				return
			}
			for _, f := range policy.Families() {
				if used, err := legacyInUse(f, Table); err != nil || used {
					t.Errorf("looking made a table: %v, %v", used, err)
				}
			}
		})
	}
}
