// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"context"
	"errors"
	"io/fs"
	"runtime"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Usage is what a variant of iptables is used for in a network namespace.
type Usage struct {
	Variant  string
	NATRules int  // in table nat, of both families, whoever wrote them
	Kubelet  bool // kubelet keeps its chains there
}

// Variants returns the usage of each variant of iptables, in the network
// namespace of the calling thread. It reads as Scan does.
func Variants(ctx context.Context) ([]Usage, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	nft, legacy := Usage{Variant: netfilter.VariantNFT}, Usage{Variant: netfilter.VariantLegacy}
	err := withTables(func(c *nfnetlink.Conn) error {
		for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
			if err := nft.countTables(c, f); err != nil {
				return err
			}
		}
		return nil
	})
	for _, f := range policy.Families() {
		err = errors.Join(err, legacy.countLegacy(f))
	}
	return []Usage{nft, legacy}, err
}

const mangleTable = "mangle"

// kubeletChains are what kubelet makes in table mangle, to show to others which
// variant it uses and to notice that somebody flushed the tables.
func kubeletChains() []string { return []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"} }

func (u *Usage) countTables(c *nfnetlink.Conn, f nfnetlink.Family) error {
	rules, err := c.Rules(f, natTable, "")
	if err != nil {
		return err
	}
	u.NATRules += len(rules)
	for _, name := range kubeletChains() {
		_, err := c.Chain(f, mangleTable, name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		u.Kubelet = u.Kubelet || err == nil
	}
	return nil
}

func (u *Usage) countLegacy(f policy.Family) error {
	nat, errNAT := iptables.Legacy(f, natTable)
	for _, c := range nat {
		u.NATRules += len(c.Rules)
	}
	mangle, errMangle := iptables.Legacy(f, mangleTable)
	u.Kubelet = u.Kubelet || slices.ContainsFunc(mangle, func(c iptables.LegacyChain) bool {
		return slices.Contains(kubeletChains(), c.Name)
	})
	return errors.Join(errNAT, errMangle)
}
