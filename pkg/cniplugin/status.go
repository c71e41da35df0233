// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// status returns why an ADD would fail now, or nil.
func (n *node) status(ctx context.Context, _ *skel.CmdArgs) error {
	err := n.checkADD(ctx)
	if err == nil {
		return nil
	}
	// containerd and the kubelet show this without a plugin's name.
	return withCode(types.ErrPluginNotAvailable, fmt.Errorf("%s: %w", config.PluginType, err))
}

// checkADD returns why an ADD would fail if the files of the dataDir could be written. It does the same as an
// ADD and asks the kernel where that writes rules. It does not know the pod to come: it passes where another
// program owns the table of the guard, which only the ADD of a pod with a new subnet has to write. A disk
// that is full or read-only fails every ADD and no STATUS: the kubelet reports DiskPressure itself, and
// evicts the pods of a node that STATUS makes NotReady.
func (n *node) checkADD(ctx context.Context) error {
	entry, err := n.validEntry(n.findNetconf())
	if err != nil {
		return err
	}
	if err := n.Dir.CheckAttach(n.network); err != nil {
		return err
	}
	reading, err := n.Dir.Read()
	if err != nil {
		return err
	}
	state := reading.State()
	if err := n.checkAgentConfig(entry, state); err != nil {
		return err
	}
	own := n.sourceWith(entry.Policy, nil)
	if n.isStored(state, own) {
		observed := n.Observe(ctx, state.Sources, state.Record)
		if n.isInForce(observed) {
			n.warnInactive(observed)
			return nil
		}
	}
	if err := n.CheckDataDir(ctx); err != nil {
		return err
	}
	lock, err := n.Dir.LockToRead(ctx)
	if err != nil {
		return err
	}
	defer func() { n.Warn(lock.Release()) }()
	reading, err = n.Dir.ReadAgain(reading)
	if err != nil {
		return err
	}
	state = reading.State()
	p, err := n.propose(ctx, state, own)
	if p == nil || err != nil {
		return err
	}
	return n.chainErr(n.CheckApply(ctx, state, p), p.Chain(own.ID))
}
