// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// NodeDataDir says which dataDir is the node's.
type NodeDataDir struct {
	// Stated returns the dataDir that the node's files state and the origin of that,
	// or "" where they state none. It is certain if each of the files could be read.
	// Nil states none.
	Stated func() (dataDir, origin string, certain bool)
	// Owned returns the chains that name an owner. Nil reads them from the kernel.
	Owned func(context.Context) ([]netfilter.OwnedChain, error)
}

// Admit tells why this dataDir may not be used, if so: it is not the node's, which is
// the one that its files state, else the one in use. Callers ask before they write
// anything; Look does not.
func (e *Enforcer) CheckDataDir(ctx context.Context) error {
	us := e.owner()
	if stated, origin, _ := e.stated(); stated != "" {
		if policy.OwnedBy(stated) == us {
			return nil
		}
		return fmt.Errorf("dataDir %s: %w: %s states %s; a node has one dataDir: use that one everywhere, "+
			"and restart a reconciler that runs with another",
			policy.Quote(e.Dir.Path()), ErrOtherDataDir, origin, policy.Quote(stated))
	}
	owned := e.owned(ctx)
	other := slices.IndexFunc(owned, func(c netfilter.OwnedChain) bool { return c.Owner.Differs(us) })
	inUse := func(c netfilter.OwnedChain) bool { return c.Owner.DataDir == us.DataDir }
	if other < 0 || slices.ContainsFunc(owned, inUse) {
		return nil
	}
	return otherOwner(owned[other], us)
}

// admitFirst is Admit before the first chains of a dataDir are written. The caller
// closes the file when they are: it is the network namespace, and locks out the first
// writes of other dataDirs, whose locks are in other directories. Any user can hold
// this lock, so whoever cannot have it goes on without.
func (e *Enforcer) admitFirst(ctx context.Context) (*os.File, error) {
	const longest, pause = 5 * time.Second, 5 * time.Millisecond
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err == nil {
		err = unix.EWOULDBLOCK
	}
	for begin := time.Now(); errors.Is(err, unix.EWOULDBLOCK) && time.Since(begin) < longest && ctx.Err() == nil; {
		if err = unix.Flock(int(namespace.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			time.Sleep(pause)
		}
	}
	if err != nil {
		e.warn(fmt.Errorf("lock the network namespace for the first write: %w", err))
	}
	fresh := *e
	fresh.Node.Owned = nil
	return namespace, fresh.CheckDataDir(ctx)
}

func (e *Enforcer) owner() policy.Owner { return policy.OwnedBy(e.Dir.Path()) }

func (e *Enforcer) stated() (dataDir, origin string, certain bool) {
	if e.Node.Stated == nil {
		return "", "", false
	}
	return e.Node.Stated()
}

// replaces reports whether it is certain that the node's files state this dataDir, so
// that chains of another one are to go. A file that cannot be read may state the other.
func (e *Enforcer) replaces() bool {
	stated, _, certain := e.stated()
	return certain && stated != "" && policy.OwnedBy(stated) == e.owner()
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

// replaceOthers removes the chains of other dataDirs, once all rules of the node's
// stand.
func (e *Enforcer) replaceOthers(ctx context.Context, v *State, lock *store.Lock) {
	if len(v.Policies) == 0 || len(v.Failed) > 0 || len(v.Diff()) > 0 || !e.replaces() {
		return
	}
	owned, err := e.Drivers.Owned(ctx)
	e.warn(err)
	v.OtherDataDirs = nil
	for _, c := range e.others(owned) {
		if err := e.remove(ctx, c.Choice, c.ChainRef, lock); err != nil {
			e.warn(err)
			v.OtherDataDirs = append(v.OtherDataDirs, c)
			continue
		}
		e.replaced(c)
	}
}

func (e *Enforcer) replaced(c netfilter.OwnedChain) {
	e.warn(fmt.Errorf("removed the rules of chain %s (%s) in %s that belonged to dataDir %s: this node has dataDir %s",
		c.Name, c.Family, c.Choice, policy.Quote(c.Owner.DataDir), policy.Quote(e.Dir.Path())))
}
