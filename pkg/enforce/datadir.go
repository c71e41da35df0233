// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// NodeDataDir says which dataDir is the node's.
type NodeDataDir struct {
	// Stated returns the dataDir that the node's files state and the origin of that,
	// or "" where they state none. Nil states none.
	Stated func() (dataDir, origin string)
	// Owned returns the chains that name an owner. Nil reads them from the kernel.
	Owned func(context.Context) ([]netfilter.OwnedChain, error)
}

// Admit tells why this dataDir may not be used, if so: it is not the node's. Callers
// ask before they write anything; Look and Ensure do not.
func (e *Enforcer) Admit(ctx context.Context) error {
	us := e.owner()
	stated, origin := e.stated()
	if stated != "" {
		if policy.NodeOwner(stated, us, nil) == us {
			return nil
		}
		return fmt.Errorf("dataDir %s: %w: %s states %s; a node has one dataDir: use that one everywhere",
			policy.Quote(e.Dir.Path()), ErrOtherOwner, origin, policy.Quote(stated))
	}
	owned := e.owned(ctx)
	var inUse []policy.Owner
	for _, c := range owned {
		inUse = append(inUse, c.Owner)
	}
	node := policy.NodeOwner("", us, inUse)
	if i := slices.Index(inUse, node); i >= 0 && node != us {
		return otherOwner(owned[i].ChainRef, owned[i].Choice, node, us)
	}
	return nil
}

func (e *Enforcer) owner() policy.Owner { return policy.OwnedBy(e.Dir.Path()) }

func (e *Enforcer) stated() (dataDir, origin string) {
	if e.Node.Stated == nil {
		return "", ""
	}
	return e.Node.Stated()
}

// replaces reports whether the node's files state this dataDir, so that chains of
// another one are to go.
func (e *Enforcer) replaces() bool {
	stated, _ := e.stated()
	return stated != "" && policy.OwnedBy(stated) == e.owner()
}

func (e *Enforcer) owned(ctx context.Context) []netfilter.OwnedChain {
	owned := e.Node.Owned
	if owned == nil {
		owned = e.Drivers.Owned
	}
	chains, err := owned(ctx)
	e.warn(err)
	return chains
}

// others returns those of the chains that name another dataDir. Chains that a newer
// version wrote are left to that.
func (e *Enforcer) others(owned []netfilter.OwnedChain) []netfilter.OwnedChain {
	return slices.DeleteFunc(slices.Clone(owned), func(c netfilter.OwnedChain) bool {
		return c.Owner.Schema > policy.RulesSchema || !c.Owner.Differs(e.owner())
	})
}
