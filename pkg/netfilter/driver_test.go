// SPDX-License-Identifier: Apache-2.0

package netfilter_test

import (
	"errors"
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

func (besideKubeProxy) HasKubeProxy() bool { return true }

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
