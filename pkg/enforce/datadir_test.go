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

// states has the node's files state a dataDir.
func (f *fixture) states(dataDir string) {
	f.enforcer.StatedDataDir = func() (string, string, bool) { return dataDir, "/etc/cni/net.d", true }
}

// stand puts a chain of another dataDir into the kernel.
func (f *fixture) stand(c netfilter.Choice, chain, dataDir string) {
	ref := netfilter.ChainRef{Family: policy.IPv4, Name: chain}
	f.kernel.chains[c][ref] = policy.Chain{
		Family: policy.IPv4, Name: chain, Owner: policy.OwnedBy(dataDir), Rules: []policy.Rule{{Verdict: policy.Masquerade}},
	}
}

func TestCheckDataDir(t *testing.T) {
	const other = "/other"
	for name, tc := range map[string]struct {
		stated string // "own" is the one that asks
		inUse  []string
		want   bool
	}{
		"no chain exists":                          {"", nil, true},
		"another is in use":                        {"", []string{other}, false},
		"it is in use itself":                      {"", []string{other, "own"}, true},
		"it is stated":                             {"own", []string{other}, true},
		"another is stated":                        {other, nil, false},
		"another is stated, and it is in use":      {other, []string{"own"}, false},
		"another is stated, and a third is in use": {other, []string{"/third"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range []netfilter.Choice{iptChoice, legacyChoice, nftChoice} {
				f := newFixture(t)
				dir := func(s string) string {
					if s == "own" {
						return f.enforcer.Dir.Path()
					}
					return s
				}
				f.states(dir(tc.stated))
				for i, d := range tc.inUse {
					f.stand(c, string(rune('X'+i)), dir(d))
				}
				err := f.enforcer.CheckDataDir(context.Background())
				if (err == nil) != tc.want || err != nil && !errors.Is(err, enforce.ErrOtherDataDir) {
					t.Errorf("%s: %v", c, err)
				}
			}
		})
	}
}

// The node's dataDir removes the chains of another once its own rules stand, and not
// before.
func TestOtherDataDirsAreReplaced(t *testing.T) {
	for _, own := range []policy.Backend{policy.IPTables, policy.NFTables} {
		f := newFixture(t)
		f.states(f.enforcer.Dir.Path())
		forms := []netfilter.Choice{iptChoice, legacyChoice, nftChoice}
		for _, c := range forms {
			f.stand(c, "A", "/other")
			f.stand(c, "X", "/other")
		}
		newer := netfilter.ChainRef{Family: policy.IPv4, Name: "N"}
		f.kernel.chains[legacyChoice][newer] = policy.Chain{Family: policy.IPv4, Name: "N", Owner: policy.Owner{Schema: 2, DataDir: "/other"}}
		before := f.kernel.dump()
		net := network("podnet", "A", backend(own))
		failing := map[policy.Backend]netfilter.Choice{policy.IPTables: iptChoice, policy.NFTables: nftChoice}[own]
		f.kernel.unusable[legacyChoice] = errors.New("not here")
		f.enforcer.KeepBackend = true
		f.kernel.unable = map[policy.Family]error{policy.IPv4: errors.New("not today")}
		if err := f.sync(net).Err("A"); err == nil || f.kernel.dump() != before {
			t.Fatalf("%s: %v\n%s", own, err, f.kernel.dump())
		}
		f.kernel.unable = nil
		f.mustBeInSync(f.sync(net))
		for _, c := range forms {
			for ref, chain := range f.kernel.chains[c] {
				if ref != newer && (c != failing || ref.Name != "A" || chain.Owner != policy.OwnedBy(f.enforcer.Dir.Path())) {
					t.Errorf("%s: %s has %v of %v", own, c, ref, chain.Owner)
				}
			}
		}
		if _, exists := f.kernel.chains[legacyChoice][newer]; !exists {
			t.Error("a chain of a newer version was removed")
		}
	}
}

// The chains of another dataDir stay if no file states this one, and also if a file
// that cannot be read may state the other.
func TestOtherDataDirsStay(t *testing.T) {
	f := newFixture(t)
	f.enforcer.StatedDataDir = func() (string, string, bool) { return f.enforcer.Dir.Path(), "/etc/cni/net.d", false }
	net := network("podnet", "A")
	f.mustBeInSync(f.sync(net))
	f.stand(legacyChoice, "X", "/other")
	f.enforcer.AllBackends = true
	v := f.sync(net)
	f.mustBeInSync(v)
	if len(v.OtherDataDirs) != 1 || v.ReplaceOtherDataDirs || len(f.kernel.chains[legacyChoice]) != 1 {
		t.Errorf("others %v, replaces %t\n%s", v.OtherDataDirs, v.ReplaceOtherDataDirs, f.kernel.dump())
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
			ref := netfilter.ChainRef{Family: policy.IPv4, Name: "A"}
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
