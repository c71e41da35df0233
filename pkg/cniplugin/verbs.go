// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// del removes the attachment and repairs the rules. It never fails because of the node's state:
// after a failing DEL a pod cannot end.
func (n *node) del(ctx context.Context, args *skel.CmdArgs) error {
	n.Warn(n.pluginFileErr)
	n.Attachments = []store.Attachment{n.attachment(args)}
	n.Warn(n.Dir.Detach(n.Attachments[0]))
	n.Warn(n.repair(ctx))
	n.resetConnections(ctx)
	return nil
}

// repair syncs the rules to the stored documents. Without a document it creates no rules, so that
// nothing returns after a cleanup, but removes what an interrupted ADD left, and a guard that no document
// asks for. If a document cannot be read it writes nothing. Where the state cannot be
// written it repairs the rules of chains that are on record, and the error is an UnwritableError.
func (n *node) repair(ctx context.Context) error {
	reading, err := n.Dir.Read()
	if err != nil {
		return err
	}
	state := reading.State()
	if n.PodsRecorded(state) && n.rulesVerified(reading) || !n.repairable(state) {
		return nil
	}
	if observed := n.Observe(ctx, state.Sources, state.Record); observed.InSync() {
		n.dueResets(observed, false)
		return nil
	}
	if err := n.checkDataDir(); err != nil {
		return err
	}
	lock, err := n.lock(ctx)
	if err != nil {
		return err
	}
	defer func() { n.Warn(lock.Release()) }()
	if state, err = n.Dir.Load(); err != nil || !n.repairable(state) {
		return err
	}
	if len(state.Sources) == 0 {
		n.RemoveLeftovers(ctx, lock)
		return nil
	}
	s := n.Sync(ctx, n.Observe(ctx, state.Sources, state.Record), lock)
	n.dueResets(s, true)
	for _, p := range s.Policies() {
		if err := s.Err(p.Chain); s.RecordErr == nil || !errors.Is(err, s.RecordErr) {
			n.Warn(err)
		}
	}
	return s.RecordErr
}

// repairable reports whether the documents are complete.
func (n *node) repairable(s store.State) bool {
	n.warnUnreadable(s)
	return len(s.Unreadable) == 0
}

// check compares every rule with the documents and writes nothing. It reports a difference only if
// a second observation, with the lock held, has it too.
func (n *node) check(ctx context.Context, args *skel.CmdArgs) error {
	if _, err := n.entry(); err != nil {
		return err
	}
	prevResult, _, _ := n.result() // CHECK needs no prevResult
	n.pod = podOf(n.attachment(args), args.Args, podinfo.Networks(prevResult, args.IfName))
	n.Attachments = []store.Attachment{n.pod.Attachment}
	if n.verify(ctx) == nil {
		return nil
	}
	if lock, err := n.Dir.LockToRead(ctx); err == nil {
		defer func() { n.Warn(lock.Release()) }()
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
	n.warnUnreadable(state)
	if state.Newer() != nil {
		return nil
	}
	if state.Find(n.source()) == nil {
		return errors.Join(n.checkDataDir(), fmt.Errorf("network %s has no document in %s that can be read", policy.Quote(n.network), n.Dir.Path()))
	}
	p := enforce.Proposal{Sources: state.Sources, Lost: n.Dir.Lost(state, n.source())}
	s := n.ObserveProposal(ctx, &p, state.Record)
	for _, p := range s.Policies() {
		var drift *enforce.DriftError
		if err := n.errUnlessNewer(s, p.Chain); err != nil && !errors.As(err, &drift) {
			return err
		}
	}
	d := s.Diff()
	for _, o := range s.Stale {
		d = append(d, policy.Change{Kind: policy.ChainChange, Family: o.Family, Chain: o.Chain, Unexpected: true})
	}
	if len(d) > 0 {
		return &enforce.DriftError{Diff: d}
	}
	return n.notExempt(s)
}

// notExempt returns that the pod is in one of nonMasqueradeNamespaces and not exempt, or nil.
func (n *node) notExempt(s *enforce.State) error {
	for _, p := range s.Policies() {
		for _, a := range n.pod.Addresses {
			f := policy.FamilyOf(a)
			if n.exempts(&p) && !n.stdinDiffers && slices.Contains(p.Families(), f) && !p.SourcesExempt(f).Contains(a) {
				return fmt.Errorf("chain %s does not exempt %s, whose pod is in one of nonMasqueradeNamespaces: "+
					"the attachment has no record of it, or another one has the address; recreate the pod", p.Chain, a)
			}
		}
	}
	return nil
}

// gc prunes the attachments that are not in the valid list, then repairs the rules (CNI spec 1.1,
// section 2).
func (n *node) gc(ctx context.Context, _ *skel.CmdArgs) error {
	n.Warn(n.pluginFileErr)
	n.AllAttachments = true
	keep, listed, err := n.validAttachments()
	if err != nil {
		return withCode(types.ErrDecodingFailure, err)
	}
	var pruned error
	if listed {
		pruned = n.Dir.Prune(n.network, keep)
	}
	unwritten := n.repair(ctx)
	if _, is := errors.AsType[*enforce.UnwritableError](unwritten); !is {
		n.Warn(unwritten)
		unwritten = nil
	}
	n.resetConnections(ctx)
	return withCode(types.ErrIOFailure, errors.Join(pruned, unwritten))
}
