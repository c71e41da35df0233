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
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
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

// listing returns a script that prints the version of an iptables-nft, and otherwise runs other commands.
func listing(commands string) string {
	return `[ "$1" != --version ] || exec echo "iptables v1.8.9 (nf_tables)"` + "\n" + commands
}

// nativeTable returns commands that write a rule to table nat which iptables-nft cannot print.
func nativeTable(family string) []string {
	return []string{
		"nft add table " + family + " nat",
		"nft 'add chain " + family + " nat POSTROUTING { type nat hook postrouting priority 100; }'",
		"nft 'add set " + family + " nat s { type ifname; }'",
		"nft add rule " + family + " nat POSTROUTING oifname @s masquerade",
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
		{name: "does not run", programs: map[string]string{"iptables": "exit 7"}, fails: []string{"sbin/iptables: exit status 7"}},
		{name: "no version", programs: map[string]string{"iptables-nft": "echo nothing"}, variant: "nft",
			fails: []string{"sbin/iptables-nft: failed to extract iptables version from [nothing", "twice in a row"}},
		{name: "crashes", programs: map[string]string{"iptables": "kill -SEGV $$"},
			fails: []string{"sbin/iptables: signal: segmentation fault; it crashed", "twice in a row"}},
		{name: "crashes while it lists", programs: map[string]string{"iptables": listing("kill -ABRT $$")},
			fails: []string{"sbin/iptables: running", "it crashed", "twice in a row"}},
		{name: "crashes as the child of a script", programs: map[string]string{"iptables": listing("/bin/sh -c 'kill -ILL $$'; exit $?")},
			fails: []string{"exit status 132", "it crashed", "twice in a row"}},
		{name: "crashes once", programs: map[string]string{"iptables": listing("[ -e /run/crashed ] || { >/run/crashed; kill -SEGV $$; }")},
			want: netfilter.Choice{Variant: "nft"}},
		{name: "nft wrote what iptables cannot list", programs: both, before: nativeTable("ip"),
			fails: []string{"iptables (nft) cannot keep rules on this host", "exit status 1"}},
		{name: "nft wrote what iptables cannot list, legacy preferred", before: nativeTable("ip"),
			programs: map[string]string{"iptables": "legacy", "iptables-nft": "nft", "iptables-legacy": "legacy"},
			want:     netfilter.Choice{Variant: "legacy"}},
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

func (works) Backend() policy.Backend { return policy.NFTables }

func (works) FindChain(context.Context, string) ([]netfilter.Choice, error) { return nil, nil }
func (works) Probe(context.Context, string) (netfilter.Choice, error)       { return netfilter.Choice{}, nil }
func (works) HasKubeProxy() (bool, error)                                   { return false, nil }

// TestChooseBusy: a program that is busy says nothing about the host, so auto chooses no other backend.
func TestChooseBusy(t *testing.T) {
	for name, fails := range map[string]string{
		"busy":   `echo "iptables: Resource temporarily unavailable" >&2; exit 4`,
		"killed": "kill -9 $$",
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			path := pathWith(t, map[string]string{"iptables": listing(fails)})
			c, err := netfilter.Drivers{New(path), works{}}.Choose(t.Context(), "X", policy.Auto, "", func(netfilter.Choice) error { return nil })
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

// TestChooseBesideNativeTable: rules are not hidden behind a table of nf_tables that iptables cannot list, of either family.
func TestChooseBesideNativeTable(t *testing.T) {
	for name, tc := range map[string]struct {
		before []string
		want   netfilter.Choice
	}{
		"no table": {want: netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}},
		"tables that iptables lists": {before: []string{"iptables-nft -t nat -A POSTROUTING -j ACCEPT", "ip6tables-nft -t nat -N X"},
			want: netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}},
		"IPv4":                {before: nativeTable("ip")},
		"IPv6":                {before: nativeTable("ip6")},
		"IPv4, another chain": {before: []string{"nft 'table ip nat { chain other { ct mark set 1; }; }'"}},
		"IPv6, another chain": {before: []string{"nft 'table ip6 nat { chain other { ct mark set 1; }; }'"}},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			shell(t, tc.before...)
			d := New(pathWith(t, map[string]string{
				"iptables-nft": "nft", "iptables-nft-restore": "nft", "ip6tables-nft": "nft", "ip6tables-nft-restore": "nft",
				"iptables-legacy": "legacy", "iptables-legacy-restore": "legacy", "ip6tables-legacy": "legacy", "ip6tables-legacy-restore": "legacy",
			}))
			c, err := netfilter.Drivers{d, works{}}.Choose(t.Context(), "X", policy.Auto, "", func(c netfilter.Choice) error {
				b := assert.Must(d.Open(c))(t)
				return errors.Join(
					b.CheckWrite(t.Context(), desired(policy.OwnedBy(owner), basic("X")), netfilter.Observation{}),
					b.CanList(t.Context(), policy.IPv4), b.CanList(t.Context(), policy.IPv6))
			})
			if err != nil || c != tc.want { // the zero value is that of the other driver
				t.Errorf("got %v, %v, want %v", c, err, tc.want)
			}
		})
	}
}

// TestChooseAfterCrash: iptables lists rules, and crashes whenever it is to write some.
func TestChooseAfterCrash(t *testing.T) {
	for name, tc := range map[string]struct {
		restore string
		want    error
	}{
		"crashes each time": {restore: "kill -SEGV $$"},
		"is killed":         {restore: "kill -KILL $$", want: netfilter.ErrBusy},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			d := New(pathWith(t, map[string]string{"iptables-nft": "nft", "iptables-nft-restore": tc.restore, "ip6tables-nft-restore": tc.restore}))
			c, err := netfilter.Drivers{d, works{}}.Choose(t.Context(), "X", policy.Auto, "", func(c netfilter.Choice) error {
				b := assert.Must(d.Open(c))(t)
				return b.CheckWrite(t.Context(), desired(policy.OwnedBy(owner), basic("X")), netfilter.Observation{})
			})
			if !errors.Is(err, tc.want) || c != (netfilter.Choice{}) {
				t.Errorf("got %v, %v, want %v", c, err, tc.want)
			}
		})
	}
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

// TestFailedReadings: without a file descriptor nothing is known of the kernel, which is no reason to choose
// another backend.
func TestFailedReadings(t *testing.T) {
	d := New(pathWith(t, map[string]string{"iptables": netfilter.VariantNFT}))
	sandbox.WithoutFiles(t)
	_, errFind := d.FindChain(t.Context(), "X")
	_, errOwned := d.Owned(t.Context())
	_, errProbe := d.Probe(t.Context(), "")
	for name, err := range map[string]error{"find": errFind, "owned": errOwned, "probe": errProbe} {
		isFailed := errors.Is(err, netfilter.ErrBusy) && !errors.Is(err, netfilter.ErrUnusable)
		if !isFailed || !errors.Is(err, unix.EMFILE) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
