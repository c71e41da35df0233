// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// guardTable stands for the guard tables where a test ranges over the places of chains.
var guardTable = netfilter.Choice{Backend: "guard table"}

// stand puts a chain of another dataDir into the kernel.
func (f *fixture) stand(c netfilter.Choice, chain, dataDir string) {
	if c == guardTable {
		f.kernel.guards = append(f.kernel.guards, policy.Guard{Chain: chain, Family: policy.IPv4, Owner: policy.OwnedBy(dataDir)})
		return
	}
	ref := policy.ChainFamily{Chain: chain, Family: policy.IPv4}
	f.kernel.chains[c][ref] = policy.Chain{
		Family: policy.IPv4, Name: chain, Owner: policy.OwnedBy(dataDir), Rules: []policy.Rule{{Verdict: policy.Masquerade}},
	}
}

// Chains and guard tables count alike.
func TestCheckDataDir(t *testing.T) {
	const other = "/other"
	for name, tc := range map[string]struct {
		inUse []string // "own" is the one that asks
		want  bool
	}{
		"none is in use":    {nil, true},
		"another is in use": {[]string{other}, false},
		"it is in use":      {[]string{"own"}, true},
		"both are in use":   {[]string{other, "own"}, true}, // nothing tells which was first
		"two others are":    {[]string{other, "/third"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range []netfilter.Choice{iptChoice, legacyChoice, nftChoice, guardTable} {
				f := newFixture(t)
				for i, d := range tc.inUse {
					if d == "own" {
						d = f.enforcer.Dir.Path()
					}
					f.stand(c, string(rune('X'+i)), d)
				}
				before := f.kernel.dump()
				err := f.enforcer.CheckDataDir(context.Background())
				if (err == nil) != tc.want || err != nil && !errors.Is(err, enforce.ErrOtherDataDir) {
					t.Errorf("%s: %v", c, err)
				}
				if tc.want {
					continue
				}
				if err := f.sync(network("podnet", "A")).Err("A"); !errors.Is(err, enforce.ErrOtherDataDir) || f.kernel.dump() != before {
					t.Errorf("%s: sync: %v\n%s", c, err, f.kernel.dump())
				}
			}
		})
	}
}

// While both dataDirs are in use, each keeps its own chains, and leaves those of the other.
func TestOtherDataDirsStay(t *testing.T) {
	f := newFixture(t)
	net := network("podnet", "A")
	f.mustBeInSync(f.sync(net))
	f.stand(legacyChoice, "X", "/other")
	f.enforcer.AllBackends = true
	v := f.sync(net)
	f.mustBeInSync(v)
	if len(v.OtherDataDirs) != 1 || len(f.kernel.chains[legacyChoice]) != 1 {
		t.Errorf("others %v\n%s", v.OtherDataDirs, f.kernel.dump())
	}
}

// Two dataDirs are about to write their first chains at the same instant, and no file
// states one. The one that comes second writes nothing, whatever its chain and backend.
func TestFirstWritesOfTwoDataDirs(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		for _, other := range []policy.Backend{policy.IPTables, policy.NFTables} {
			for _, chain := range []string{"A", "B"} {
				f, g := newFixture(t), newFixture(t)
				g.kernel, g.enforcer.Drivers = f.kernel, f.enforcer.Drivers
				var stood string
				f.kernel.between = func() {
					g.mustBeInSync(g.sync(network("blue", chain, backend(other))))
					stood = f.kernel.dump()
				}
				err := f.sync(network("podnet", "A", backend(b))).Err("A")
				if !errors.Is(err, enforce.ErrOtherDataDir) || f.kernel.dump() != stood || stood == "" {
					t.Errorf("%s, %s %s: %v\n%s\nstood:\n%s", b, other, chain, err, f.kernel.dump(), stood)
				}
				if len(f.record().Chains) > 0 {
					t.Errorf("%s, %s %s: recorded %v", b, other, chain, f.record().Chains)
				}
			}
		}
	}
}

// A new chain is written in all of its families or in none. A repair does what it
// can.
func TestFamilyThatCannotBeWritten(t *testing.T) {
	for _, b := range []policy.Backend{policy.IPTables, policy.NFTables} {
		t.Run(string(b), func(t *testing.T) {
			f := newFixture(t)
			both := network("both", "A", backend(b), enableIPv6)
			four := network("four", "B", backend(b))
			f.kernel.unable = map[policy.Family]error{policy.IPv6: errors.New("no IPv6 here")}
			f.sync(network("both", "A", backend(b)), four)
			stood := f.kernel.dump()
			if err := f.sync(both, four).Err("A"); err == nil || f.kernel.dump() != stood {
				t.Errorf("%v\n%s", err, f.kernel.dump())
			}
			f.kernel.unable = nil
			f.mustBeInSync(f.sync(both, four))
			if b != policy.IPTables {
				return // one batch for both families
			}
			right := f.kernel.dump()
			ref := policy.ChainFamily{Chain: "A", Family: policy.IPv4}
			c := f.kernel.chains[iptChoice][ref]
			c.Rules = slices.Clone(c.Rules)[1:]
			f.kernel.chains[iptChoice][ref] = c
			f.kernel.unable = map[policy.Family]error{policy.IPv6: errors.New("no IPv6 here")}
			f.sync(both, four)
			if now := f.kernel.dump(); now != right {
				t.Errorf("not repaired:\n%s", now)
			}
		})
	}
}
