// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Cleanup removes all that is ours on the node, in every backend and family, and
// then the dataDir. It fails where a reconciler runs, which would bring all of it
// back, and leaves the dataDir as long as something is there that it describes.
func (n *Node) Cleanup(ctx context.Context, warn func(error)) (removed []enforce.RemovedChain, err error) {
	lead, err := n.Dir.InstanceLock()
	if errors.Is(err, store.ErrBusy) {
		return nil, fmt.Errorf("%w, and would bring back what is removed; stop it first", err)
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lead.Release()) }()
	wait, cancel := context.WithTimeout(ctx, n.LockWait)
	defer cancel()
	lock, err := n.Dir.Lock(wait)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	state, err := n.Dir.Load()
	if err != nil {
		return nil, err
	}
	if err := newer(state); err != nil {
		return nil, err
	}
	removed, err = n.Enforcer(&Sources{}, warn).RemoveAll(ctx, chains(state), state.Record, lock)
	if err != nil {
		return removed, err
	}
	return removed, lock.Destroy()
}

// chains returns the names of the chains that the documents speak of, and the
// agents' own. Those that nothing speaks of any more say themselves whose they are.
func chains(state store.State) []string {
	names := []string{policy.DefaultChain}
	add := func(name string) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	for _, c := range state.Record.Chains {
		add(c.Chain)
	}
	for _, c := range state.Sources {
		add(c.Policy.Chain)
	}
	return names
}
