// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// del removes the attachment and repairs the rules. It never fails because of the node's state:
// after a failing DEL a pod cannot end.
func (n *node) del(ctx context.Context, args *skel.CmdArgs) error {
	n.Warn(n.pluginFileErr)
	n.Warn(n.Dir.Detach(n.attachment(args)))
	resetLimit, err := n.repair(ctx)
	n.Warn(err)
	n.resetConnections(ctx, resetLimit)
	return nil
}

// gc prunes the attachments that are not in the valid list, then repairs the rules (CNI spec 1.1,
// section 2). It repairs what it can before it says that the state cannot be written.
func (n *node) gc(ctx context.Context, _ *skel.CmdArgs) error {
	n.Warn(n.pluginFileErr)
	keep, listed, err := n.validAttachments()
	if err != nil {
		return withCode(types.ErrDecodingFailure, err)
	}
	var pruned error
	if listed {
		pruned = n.Dir.Prune(n.network, keep)
	}
	resetLimit, unrepaired := n.repair(ctx)
	if !isOfState(unrepaired) {
		n.Warn(unrepaired)
		unrepaired = nil
	}
	n.resetConnections(ctx, resetLimit)
	if n.network == config.BootNetwork {
		n.Warn(n.Dir.RecordBootUnit())
	}
	return withCode(types.ErrIOFailure, errors.Join(pruned, unrepaired))
}

// isOfState reports whether the dataDir is refused, or cannot be written.
func isOfState(err error) bool {
	_, isUnwritable := errors.AsType[*enforce.UnwritableError](err)
	return isUnwritable || errors.Is(err, store.ErrRefused)
}

// validAttachments returns the attachments that GC keeps, and whether the configuration has that
// list: an absent list differs from one that is empty or null.
func (n *node) validAttachments() (keep []store.Attachment, listed bool, err error) {
	const key = "cni.dev/valid-attachments"
	list := n.netconf.Value(key)
	if err := n.netconf.Err(); err != nil || list == nil {
		return nil, false, err
	}
	var valid []types.GCAttachment
	if err := json.Unmarshal(list, &valid); err != nil {
		return nil, false, fmt.Errorf("%s: %w", key, err)
	}
	for _, a := range valid {
		keep = append(keep, store.Attachment{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return keep, true, nil
}

// repair syncs the rules to the stored documents. Without a document it creates no rules, so that nothing
// returns after a cleanup, but removes what an interrupted ADD left, and a guard that no document asks for.
// If a document cannot be read it writes nothing; a damaged record is written again. It stores no document, as
// its own entry may be stale. Where the state cannot be written it repairs the rules of chains that are on
// record, and the error is an UnwritableError. It returns how long connections are to be reset.
func (n *node) repair(ctx context.Context) (resetLimit time.Duration, err error) {
	reading, err := n.Dir.Read()
	if err != nil {
		return 0, err
	}
	state := reading.State()
	isVerified := n.PodsRecorded(state) && n.rulesAreVerified(reading, n.Dir.VerificationCache(n.source()))
	if isVerified || !n.isRepairable(state) {
		return 0, nil
	}
	observed := n.Observe(ctx, state.Sources, state.Record)
	if observed.InSync() {
		return n.resetLimit(observed, nil, false), nil
	}
	if err := n.CheckDataDir(ctx); err != nil {
		return 0, err
	}
	lock, err := n.lock(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { n.Warn(lock.Release()) }()
	state, err = n.Dir.Load()
	if err != nil || !n.isRepairable(state) {
		return 0, err
	}
	if len(state.Sources) == 0 {
		isRecordDamaged := len(state.Unreadable) > 0 // which has what is left over
		if !isRecordDamaged {
			n.RemoveLeftovers(ctx, lock)
		}
		return 0, nil
	}
	s := n.Sync(ctx, n.Observe(ctx, state.Sources, state.Record), lock)
	for _, p := range s.Policies() {
		err := s.Err(p.Chain)
		isOfRecord := s.RecordErr != nil && errors.Is(err, s.RecordErr)
		if !isOfRecord {
			n.Warn(err)
		}
	}
	return n.resetLimit(s, nil, true), s.RecordErr
}

// isRepairable reports whether the documents are complete, apart from what the next write replaces: a power
// cut can leave a torn record, and after a boot nothing in it is needed.
func (n *node) isRepairable(s store.State) bool {
	n.warnUnreadable(s)
	return len(n.Dir.Lost(s)) == 0
}
