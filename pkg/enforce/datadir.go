// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// ErrOtherDataDir is wrapped by errors about a dataDir that is not the node's, and about a chain or guard
// table whose comment names another one. Such a chain is not drift: two dataDirs would revert each
// other's rules.
var ErrOtherDataDir = errors.New("this node has another dataDir")

// CheckDataDir returns why this dataDir must not be used, or nil: the chains and guard tables in the kernel
// belong to another one. Callers ask before they write anything; Observe does not. If the kernel has chains
// of two dataDirs, such as of a saved ruleset, both keep working and the node is not ready: which one was
// first is not known, and pods have to start.
func (e *Enforcer) CheckDataDir(ctx context.Context) error {
	others, inUse := otherDataDirs(e.owned(ctx), e.owner())
	if len(others) == 0 || inUse {
		return nil
	}
	return otherDataDir(others[0], e.Dir.Path())
}

// owned returns the chains and guard tables that name an owner. It warns of a backend that cannot be read:
// what is known of the others counts, as a node has to work whose other backend is broken.
func (e *Enforcer) owned(ctx context.Context) []netfilter.OwnedChain {
	read := e.Owned
	if read == nil {
		read = e.Drivers.Owned
	}
	owned, err := read(ctx)
	e.Warn(err)
	return owned
}

// otherDataDirs returns those that name another dataDir, and whether any names this one.
func otherDataDirs(
	owned []netfilter.OwnedChain, us policy.Owner,
) (others []netfilter.OwnedChain, inUse bool) {
	for _, c := range owned {
		if c.Owner.DataDir == us.DataDir {
			inUse = true
		}
		if c.Owner.Differs(us) {
			others = append(others, c)
		}
	}
	return others, inUse
}

// otherDataDir returns that a chain or guard table belongs to another dataDir than this one.
func otherDataDir(c netfilter.OwnedChain, dataDir string) error {
	other := policy.Quote(c.Owner.DataDir)
	return fmt.Errorf("%s: %w: it belongs to %s and not to %s; a node has one dataDir: use %s everywhere; "+
		"or, to move, run ip-masq-reconciler cleanup --data-dir %s, then change dataDir in all plugin entries "+
		"and data_dir in plugin.toml",
		c, ErrOtherDataDir, other, policy.Quote(dataDir), other, other)
}

// checkFirstWrite is CheckDataDir before the first chains of a dataDir are written. The caller closes the
// namespace, if there is one, after that write: it locks the network namespace against the first writes of
// other dataDirs, whose own locks are in other directories. Any user can hold this lock, so it is not waited
// for without end.
func (e *Enforcer) checkFirstWrite(ctx context.Context) (ns.NetNS, error) {
	namespace, err := ns.GetCurrentNS()
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
