// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// add notes the attachment and makes sure of the rules. When all is right it
// only reads, and seals what it found for the next.
func (p *Plugin) add(ctx context.Context, args *skel.CmdArgs) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	if !n.judged() { // only what is admitted may be attached
		if _, err := n.admit(); err != nil {
			return err
		}
		if err := n.firstWrite(ctx); err != nil {
			return err
		}
	}
	result, err := passThrough(args.StdinData, n.version)
	if err != nil {
		return withCode(types.ErrInvalidNetworkConfig, err)
	}
	if err := n.Dir.Attach(n.network, args.ContainerID, args.IfName); err != nil {
		n.Warn(err)
	}
	if err := n.makeSure(ctx); err != nil {
		return err
	}
	_, err = p.Stdout.Write(result)
	return err
}

// firstWrite is mayWrite for an ADD that is bound to write, as its network has no
// document: not even the attachment is to be left in a dataDir that is not the node's.
func (n *node) firstWrite(ctx context.Context) error {
	if _, err := os.Lstat(n.Dir.DocumentPath(n.source())); !errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return n.mayWrite(ctx)
}

// makeSure makes the entry the network's document and the rules follow it. It
// reads the documents after the attachment was made: a reconciler that drops the
// network has either done so by now, or sees that it is used.
func (n *node) makeSure(ctx context.Context) error {
	short, err := n.shortcut()
	if err != nil || short.holdsFor() {
		return err
	}
	entry, err := n.admit()
	if err != nil {
		return err
	}
	state := short.reading.State()
	own, err := n.own(entry, state)
	if err != nil {
		return err
	}
	if n.settled(state, own) {
		short.begin(state.Record)
		if v := n.Observe(ctx, state.Sources, state.Record); v.InSync() {
			short.end()
			return nil
		}
	}
	if err := n.mayWrite(ctx); err != nil {
		return err
	}
	take := n.Dir.Lock
	if n.dryRun {
		take = n.Dir.DryRun
	}
	lock, err := n.lock(ctx, take)
	if err != nil {
		return n.withoutLock(ctx, state, own, err)
	}
	defer n.release(lock)
	return n.makeSureLocked(ctx, lock, own)
}

// own returns what the entry contributes, and fails where it wants to wait for
// the agents' contribution.
func (n *node) own(entry config.Entry, s store.State) (policy.Source, error) {
	own := policy.Source{ID: n.source(), Policy: entry.Policy}
	if entry.RequireAgentConfig && s.Find(policy.SourceID{Kind: policy.AgentFiles}) == nil {
		return own, withCode(types.ErrTryAgainLater, errors.New("requireAgentConfig: no policy of the agent files is stored yet; "+
			"start ip-masq-reconciler with an agent_config_dir, or remove the key"))
	}
	return own, nil
}

// settled reports whether the documents are whole and have the statement as the
// one in force.
func (n *node) settled(s store.State, own policy.Source) bool {
	stored := s.Find(own.ID)
	return len(s.Newer) == 0 && len(s.Damaged) == 0 &&
		stored != nil && !stored.Superseded && stored.Policy.Equal(own.Policy)
}

// makeSureLocked is the way on which something is written.
func (n *node) makeSureLocked(ctx context.Context, lock *store.Lock, own policy.Source) error {
	state, err := n.Dir.Load()
	if err != nil {
		return err
	}
	n.disk.read = nil // it may have changed while the lock was waited for
	n.warnState(state)
	if len(state.Newer) > 0 {
		return n.besideNewer(ctx, state, own)
	}
	n.Warn(lock.Tidy(state))
	proposal, err := n.propose(state, own)
	if err != nil {
		return err
	}
	chain := proposal.Chain(own.ID)
	v, err := n.ApplyProposal(ctx, lock, state, proposal, func(v *enforce.State) error { return n.verdict(v, chain) })
	var unwritable *enforce.UnwritableError
	if errors.As(err, &unwritable) {
		return n.unwritable(v, chain, err)
	}
	return err
}

// verdict fails for the network's own chain alone; what is wrong with others is
// told, and stops nobody here.
func (n *node) verdict(v *enforce.State, chain string) error {
	n.Warn(v.RecordErr)
	for _, w := range v.LinearWarnings() {
		n.Warn(w)
	}
	for _, p := range v.Policies {
		for _, e := range p.Conflicts.Summary() {
			n.Warn(e)
		}
		if p.Chain != chain {
			n.Warn(v.Err(p.Chain))
		}
	}
	return n.tolerable(v, chain)
}

// tolerable returns why the rules of a chain cannot be vouched for, unless it
// is that a newer version wrote them: those stay as they are, and serve.
func (n *node) tolerable(v *enforce.State, chain string) error {
	err := v.Err(chain)
	if errors.Is(err, enforce.ErrNewer) && v.Exists(chain) {
		n.Warn(err)
		return nil
	}
	return err
}

// besideNewer lets an ADD pass beside documents that a newer version wrote, as
// long as the chain stands; nothing can be verified against them.
func (n *node) besideNewer(ctx context.Context, s store.State, own policy.Source) error {
	newer := fmt.Errorf("document %s: %w: it has schema %d and this program knows schemas up to %d; "+
		"install the newer version again", s.Newer[0].File, enforce.ErrNewer, s.Newer[0].Schema, store.Schema)
	v := n.Observe(ctx, enforce.WithSource(s.Sources, own), s.Record)
	if v.Exists(own.Policy.Chain) {
		n.Warn(newer)
		return nil
	}
	return withCode(codeRules, fmt.Errorf("chain %s does not exist, and is not created without all documents: %w", own.Policy.Chain, newer))
}

// withoutLock decides an ADD that cannot have the lock: where nobody else has
// it, the dataDir cannot be written, which hinders only if something must be.
func (n *node) withoutLock(ctx context.Context, s store.State, own policy.Source, cause error) error {
	if errors.Is(cause, store.ErrBusy) {
		return cause
	}
	if len(s.Newer) > 0 {
		return n.besideNewer(ctx, s, own)
	}
	proposal, err := n.propose(s, own)
	if err != nil {
		return err
	}
	return n.unwritable(n.Observe(ctx, proposal.Sources, s.Record), proposal.Chain(own.ID), cause)
}

// unwritable passes if the rules are right as they are.
func (n *node) unwritable(v *enforce.State, chain string, cause error) error {
	if err := n.tolerable(v, chain); err != nil {
		return withCode(codeRules, fmt.Errorf("the rules need a change and the state cannot be written: %w", errors.Join(cause, err)))
	}
	n.Warn(fmt.Errorf("the rules are right, but the state cannot be written: %w", cause))
	return nil
}
