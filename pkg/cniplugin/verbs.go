// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// del drops the attachment and makes sure of the rules as the documents have
// them. It never fails for the state of the node: a failing DEL leaves a pod
// that cannot end.
func (p *Plugin) del(ctx context.Context, args *skel.CmdArgs) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	n.Warn(n.guardErr)
	n.Warn(n.Dir.Detach(n.network, args.ContainerID, args.IfName))
	n.Warn(n.repair(ctx))
	return nil
}

// repair makes sure of the rules as the documents have them. Without a document
// it makes none, so that nothing comes back after a clean-up, but removes what an
// ADD left that was killed before it had one; and beside one that cannot be read it
// takes nothing away.
func (n *node) repair(ctx context.Context) error {
	short, err := n.shortcut()
	if err != nil || short.holds() {
		return err
	}
	state := n.repairable(short.reading.State())
	if state == nil || n.Observe(ctx, state.Sources, state.Record).InSync() {
		return nil
	}
	if err := n.mayWrite(ctx); err != nil {
		return err
	}
	lock, err := n.lock(ctx, n.Dir.Lock)
	if err != nil {
		return err
	}
	defer n.release(lock)
	again, err := n.Dir.Load()
	if err != nil {
		return err
	}
	if state = n.repairable(again); state == nil {
		return nil
	}
	if len(state.Sources) == 0 {
		n.RemoveLeftovers(ctx, lock)
		return nil
	}
	v := n.Sync(ctx, n.Observe(ctx, state.Sources, state.Record), lock)
	for _, p := range v.Policies {
		n.Warn(v.Err(p.Chain))
	}
	return nil
}

// repairable returns the state if the rules can be held against its documents,
// or nil.
func (n *node) repairable(s store.State) *store.State {
	n.warnState(s)
	if len(s.Newer)+len(s.Damaged) > 0 || len(s.Sources)+len(s.Record.Chains) == 0 {
		return nil
	}
	return &s
}

// check verifies every rule against the documents and writes nothing. What
// looks wrong is read again once nobody is about to change it.
func (p *Plugin) check(ctx context.Context, args *skel.CmdArgs) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	if _, err := n.admit(); err != nil {
		return err
	}
	if n.verify(ctx) == nil {
		return nil
	}
	if lock, err := n.lock(ctx, n.Dir.LockToRead); err == nil {
		defer n.release(lock)
	} else {
		n.Warn(err)
	}
	return withCode(codeDrift, n.verify(ctx))
}

func (n *node) verify(ctx context.Context) error {
	state, err := n.Dir.Load()
	if err != nil {
		return err
	}
	n.warnState(state)
	if len(state.Newer) > 0 {
		n.Warn(fmt.Errorf("document %s: %w", state.Newer[0].File, enforce.ErrNewer))
		return nil
	}
	if state.Find(n.source()) == nil {
		return fmt.Errorf("network %s has no document in %s: the next ADD makes it", policy.Quote(n.network), n.Dir.Path())
	}
	v := n.Observe(ctx, state.Sources, state.Record)
	for _, p := range v.Policies {
		var drift *enforce.DriftError
		if err := n.tolerable(v, p.Chain); err != nil && !errors.As(err, &drift) {
			return err
		}
	}
	if d := v.Diff(); len(d) > 0 {
		return &enforce.DriftError{Diff: d}
	}
	return nil
}

// gc prunes the attachments that are not in the valid list and makes sure of
// the rules (CNI spec 1.1, section 2).
func (p *Plugin) gc(ctx context.Context, args *skel.CmdArgs) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	n.Warn(n.guardErr)
	keep, listed, err := validAttachments(args.StdinData)
	if err != nil {
		return withCode(types.ErrDecodingFailure, err)
	}
	if listed {
		if err := n.Dir.Prune(n.network, keep); err != nil {
			return withCode(types.ErrIOFailure, err)
		}
	}
	n.Warn(n.repair(ctx))
	return nil
}

// validAttachments tells a list that is absent from one that is empty or null.
func validAttachments(netconf []byte) (keep []store.Attachment, listed bool, err error) {
	const key = "cni.dev/valid-attachments"
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(netconf, &keys); err != nil {
		return nil, false, fmt.Errorf("%s: %w", key, err)
	}
	raw, listed := keys[key]
	if !listed {
		return nil, false, nil
	}
	var valid []types.GCAttachment
	if err := json.Unmarshal(raw, &valid); err != nil {
		return nil, false, fmt.Errorf("%s: %w", key, err)
	}
	for _, a := range valid {
		keep = append(keep, store.Attachment{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return keep, true, nil
}

// status answers whether an ADD would fail now. It is the ADD, as a dry run: so the
// two cannot disagree.
func (p *Plugin) status(ctx context.Context, args *skel.CmdArgs) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	n.dryRun = true
	_, err := n.admit()
	if err == nil {
		err = n.makeSure(ctx)
	}
	if err != nil { // containerd and kubelet show this without a plugin's name
		err = fmt.Errorf("%s: %w", config.PluginType, err)
	}
	return withCode(types.ErrPluginNotAvailable, err)
}

func codeOfConfig(err error) uint {
	if errors.Is(err, config.ErrNotJSON) {
		return types.ErrDecodingFailure
	}
	return types.ErrInvalidNetworkConfig
}
