// SPDX-License-Identifier: Apache-2.0

package netfilter_test

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestRuleset: the ruleset is that of the driver that has one, wherever it stands.
func TestRuleset(t *testing.T) {
	k := netfiltertest.New()
	all := k.Drivers()
	for _, drivers := range []netfilter.Drivers{all, {all[1], all[0]}} {
		tables := assert.Must(drivers.GuardTables())(t)
		assert.NoError(t, tables.ApplyGuards(t.Context(), []policy.Guard{{Chain: "X"}}, netfilter.GuardObservation{}))
		assert.Equal(t, "generation", assert.Must(drivers.Generation())(t), k.Generation)
	}
	assert.Equal(t, "guards", len(k.Guards), 1)
}

// TestNoRuleset: a program without nf_tables has neither guard tables nor a generation.
func TestNoRuleset(t *testing.T) {
	onlyIPTables := netfiltertest.New().Drivers()[:1]
	if _, err := onlyIPTables.GuardTables(); !errors.Is(err, netfilter.ErrUnusable) {
		t.Errorf("guard tables: %v", err)
	}
	if _, err := onlyIPTables.Generation(); !errors.Is(err, netfilter.ErrUnusable) {
		t.Errorf("generation: %v", err)
	}
}

// besideKubeProxy is the driver of the backend in which kube-proxy writes its rules.
type besideKubeProxy struct{ netfilter.Driver }

func (besideKubeProxy) HasKubeProxy() (bool, error) { return true, nil }

// TestChoosePreferred: auto chooses the backend that has the chain, else that of kube-proxy's rules, else that of
// the last boot, else the first.
func TestChoosePreferred(t *testing.T) {
	accepts := func(netfilter.Choice) error { return nil }
	k := netfiltertest.New()
	drivers := k.Drivers()
	choose := func(ds netfilter.Drivers, lastBoot policy.Backend) netfilter.Choice {
		return assert.Must(ds.Choose(t.Context(), "X", policy.Auto, lastBoot, accepts))(t)
	}
	beside := netfilter.Drivers{drivers[0], besideKubeProxy{drivers[1]}}
	assert.Equal(t, "the first", choose(drivers, ""), netfiltertest.IPTables)
	assert.Equal(t, "of the last boot", choose(drivers, policy.NFTables), netfiltertest.NFTables)
	assert.Equal(t, "beside kube-proxy", choose(beside, policy.IPTables), netfiltertest.NFTables)
	k.Unusable[netfiltertest.NFTables] = netfilter.ErrUnusable
	assert.Equal(t, "of the last boot, unusable", choose(drivers, policy.NFTables), netfiltertest.IPTables)
	delete(k.Unusable, netfiltertest.NFTables)
	k.Chains[netfiltertest.IPTables][policy.ChainFamily{Family: policy.IPv4, Chain: "X"}] = policy.Chain{}
	assert.Equal(t, "has the chain", choose(beside, policy.NFTables), netfiltertest.IPTables)
}

// TestChooseNeedsReadings: a reading that fails chooses no backend, and one that the kernel refuses for good leaves
// the other backend.
func TestChooseNeedsReadings(t *testing.T) {
	errFailed := fmt.Errorf("the kernel did not answer: %w", netfilter.ErrBusy)
	errRefused := fmt.Errorf("no nf_tables: %w", netfilter.ErrUnusable)
	accepts := func(netfilter.Choice) error { return nil }
	for _, tc := range []struct {
		name   string
		errors map[string]error // by effect
		stated policy.Backend
		want   netfilter.Choice // none: an error
	}{
		{"a reading fails", map[string]error{"find chain X in nftables": errFailed}, policy.Auto, netfilter.Choice{}},
		{"of the stated backend", map[string]error{"find chain X in nftables": errFailed}, policy.NFTables, netfilter.Choice{}},
		{"of another than the stated one", map[string]error{"find chain X in nftables": errFailed}, policy.IPTables, netfiltertest.IPTables},
		{"lacking", map[string]error{"find chain X in nftables": errRefused}, policy.Auto, netfiltertest.IPTables},
		{"forbidden", map[string]error{"find chain X in nftables": fs.ErrPermission}, policy.Auto, netfiltertest.IPTables},
		{"forbidden in part, failed in part", map[string]error{
			"find chain X in nftables": errors.Join(fs.ErrPermission, errFailed),
		}, policy.Auto, netfilter.Choice{}},
		{"asking whether it works fails", map[string]error{"probe iptables": errFailed}, policy.Auto, netfilter.Choice{}},
		{"it does not work", map[string]error{"probe iptables": errRefused}, policy.Auto, netfiltertest.NFTables},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k := netfiltertest.New()
			k.Before = func(effect string, _ bool) error { return tc.errors[effect] }
			got, err := k.Drivers().Choose(t.Context(), "X", tc.stated, "", accepts)
			isChosen := tc.want != netfilter.Choice{}
			if got != tc.want || (err == nil) != isChosen {
				t.Errorf("got %v, %v; want %v", got, err, tc.want)
			}
		})
	}
}

// TestFailedReadingsAreReported: chains that could not be read are not chains that do not exist.
func TestFailedReadingsAreReported(t *testing.T) {
	errFailed := fmt.Errorf("the kernel did not answer: %w", netfilter.ErrBusy)
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"failed":            {errFailed, true},
		"lacking":           {netfilter.ErrUnusable, false},
		"forbidden":         {fs.ErrPermission, false},
		"forbidden in part": {errors.Join(fs.ErrPermission, errFailed), true},
	} {
		t.Run(name, func(t *testing.T) {
			k := netfiltertest.New()
			k.Before = func(string, bool) error { return tc.err }
			_, err := k.Drivers().Owned(t.Context())
			if (err != nil) != tc.want {
				t.Errorf("owned: %v", err)
			}
		})
	}
	k := netfiltertest.New()
	k.Before = func(effect string, _ bool) error {
		if effect == "find chain X in iptables" {
			return netfilter.ErrUnusable
		}
		return errFailed
	}
	_, err := k.Drivers().Duplicates(t.Context(), "X", netfilter.Choice{})
	if errors.Is(err, netfilter.ErrUnusable) || !errors.Is(err, netfilter.ErrBusy) {
		t.Errorf("duplicates: %v", err)
	}
}
