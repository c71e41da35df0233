// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// CheckDataDir returns why this dataDir must not be used, or nil: the node's is another one, which
// its files state or, if they state none, which is in use. Callers ask before they write anything;
// Observe does not.
func (e *Enforcer) CheckDataDir(ctx context.Context) error {
	us := e.owner()
	if stated, origin, _ := e.statedDataDir(); stated != "" {
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
	return otherDataDir(owned[other], us)
}

func otherDataDir(c netfilter.OwnedChain, us policy.Owner) error {
	return fmt.Errorf("chain %s (%s) in %s: %w: the chain belongs to %s and not to %s; a node has one dataDir: "+
		"use that one everywhere, or run ip-masq-reconciler cleanup with --data-dir %s first",
		c.Name, c.Family, c.Choice, ErrOtherDataDir, policy.Quote(c.Owner.DataDir), policy.Quote(us.DataDir), policy.Quote(c.Owner.DataDir))
}

// checkFirstWrite is CheckDataDir before the first chains of a dataDir are written. The caller
// closes the file after that write: it locks the network namespace against the first writes of
// other dataDirs, whose own locks are in other directories. Any user can hold this lock, so it is
// not waited for without end.
func (e *Enforcer) checkFirstWrite(ctx context.Context) (*os.File, error) {
	namespace, err := os.Open("/proc/thread-self/ns/net")
	if err == nil {
		wait, cancel := context.WithTimeout(ctx, 5*time.Second)
		err = safefile.Flock(wait, namespace)
		cancel()
	}
	if err != nil {
		e.Warn(fmt.Errorf("lock the network namespace for the first write: %w", err))
	}
	fresh := *e
	fresh.Owned = nil
	return namespace, fresh.CheckDataDir(ctx)
}

func (e *Enforcer) owner() policy.Owner { return policy.OwnedBy(e.Dir.Path()) }

func (e *Enforcer) statedDataDir() (dataDir, origin string, certain bool) {
	if e.StatedDataDir == nil {
		return "", "", false
	}
	return e.StatedDataDir()
}

// replaces reports whether it is certain that the node's files state this dataDir, so that the
// chains of other dataDirs are removed. A file that cannot be read may state another.
func (e *Enforcer) replaces() bool {
	stated, _, certain := e.statedDataDir()
	return certain && stated != "" && policy.OwnedBy(stated) == e.owner()
}

func (e *Enforcer) owned(ctx context.Context) []netfilter.OwnedChain {
	owned := e.Owned
	if owned == nil {
		owned = e.Drivers.Owned
	}
	chains, err := owned(ctx)
	e.Warn(err)
	return chains
}

// ofOtherDataDirs returns those of the chains that name another dataDir, without those that a newer
// version wrote.
func (e *Enforcer) ofOtherDataDirs(owned []netfilter.OwnedChain) []netfilter.OwnedChain {
	return slices.DeleteFunc(slices.Clone(owned), func(c netfilter.OwnedChain) bool {
		return c.Owner.Schema > policy.RulesSchema || !c.Owner.Differs(e.owner())
	})
}

// replaceOtherDataDirs removes the chains of other dataDirs, once all desired rules are in place.
func (e *Enforcer) replaceOtherDataDirs(ctx context.Context, s *State, lock *store.Lock) {
	if len(s.Policies) == 0 || len(s.Failed) > 0 || len(s.Diff()) > 0 || !e.replaces() {
		return
	}
	owned, err := e.Drivers.Owned(ctx)
	e.Warn(err)
	s.OtherDataDirs = nil
	for _, c := range e.ofOtherDataDirs(owned) {
		if err := e.remove(ctx, c.Choice, lock, c.ChainRef); err != nil {
			e.Warn(err)
			s.OtherDataDirs = append(s.OtherDataDirs, c)
			continue
		}
		e.warnReplaced(c)
	}
}

func (e *Enforcer) warnReplaced(c netfilter.OwnedChain) {
	e.Warn(fmt.Errorf("removed the rules of chain %s (%s) in %s that belonged to dataDir %s: this node has dataDir %s",
		c.Name, c.Family, c.Choice, policy.Quote(c.Owner.DataDir), policy.Quote(e.Dir.Path())))
}
