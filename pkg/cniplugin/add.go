// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// add records the attachment and ensures the rules. If all is right it only reads.
func (n *node) add(ctx context.Context, args *skel.CmdArgs) error {
	prevResult, result, resultErr := n.result()
	addresses := podAddresses(prevResult, args.IfName)
	if !n.pluginFile.Present {
		n.subnets = podSubnets(addresses)
	}
	if !n.entryVerified() {
		if _, err := n.entry(); err != nil { // a refused entry is not attached
			return err
		}
		// An ADD without a document is bound to write. In a dataDir that is not the node's it
		// leaves nothing, not even the attachment.
		if _, err := os.Lstat(n.Dir.DocumentPath(n.source())); errors.Is(err, os.ErrNotExist) {
			if err := n.checkDataDir(); err != nil {
				return err
			}
		}
	}
	if resultErr != nil {
		return withCode(types.ErrInvalidNetworkConfig, resultErr)
	}
	n.pod = podOf(n.attachment(args), args.Args, addresses)
	if n.stdinDiffers {
		n.pod.Addresses = nil // anybody may choose them
	}
	n.Attachments = []store.Attachment{n.pod.Attachment}
	n.rememberEntry()
	n.recordErr = n.Dir.Attach(n.pod)
	if n.recordErr != nil {
		n.Warn(fmt.Errorf("cannot record the pod: %w", n.recordErr))
	}
	if err := n.sync(ctx); err != nil {
		return err
	}
	n.resetConnections(ctx)
	_, err := n.plugin.Stdout.Write(result)
	return err
}

// status returns why an ADD would fail now, or nil. It is the ADD as a dry run, so that the two
// agree.
func (n *node) status(ctx context.Context, _ *skel.CmdArgs) error {
	n.dryRun = true
	_, err := n.entry()
	if err == nil {
		err = n.sync(ctx)
	}
	if err != nil { // containerd and the kubelet show this without a plugin's name
		err = fmt.Errorf("%s: %w", config.PluginType, err)
	}
	return withCode(types.ErrPluginNotAvailable, err)
}

// sync makes the entry the network's document and syncs the rules. It reads the documents after
// the attachment was recorded: a reconciler that drops the network has either done so by now, or
// finds the attachment.
func (n *node) sync(ctx context.Context) error {
	reading, err := n.Dir.Read()
	if err != nil {
		return err
	}
	if n.recordErr != nil {
		if err := n.podErr(n.Policies(reading.State())); err != nil {
			return err
		}
	}
	verified := !n.dryRun && n.sameInputs(reading) && n.entryVerified()
	concerned := n.concernsPod(reading)
	if verified && !concerned && n.rulesVerified(reading) {
		return nil
	}
	state := reading.State()
	if verified && concerned && n.PodsRecorded(state) && n.rulesVerified(reading) {
		return nil
	}
	stored := state.Find(n.source())
	own := policy.Source{ID: n.source(), PodSubnets: n.subnets}
	if n.pluginFile.Present {
		own.ConfDir = n.pluginFile.CNIConfDir
	}
	if verified && stored != nil {
		own.Policy = stored.Policy
	} else {
		entry, err := n.entry()
		if err != nil {
			return err
		}
		if entry.RequireAgentConfig && state.Find(policy.SourceID{Kind: policy.AgentFiles}) == nil {
			return withCode(types.ErrTryAgainLater, errors.New("requireAgentConfig: no policy of the agent files is stored yet; "+
				"start ip-masq-reconciler with an agent_config_dir, or remove the key"))
		}
		own.Policy = entry.Policy
	}
	var observed *enforce.State
	if len(state.Newer) == 0 && len(state.Damaged) == 0 &&
		stored != nil && !stored.Superseded && stored.Policy.Equal(own.Policy) &&
		(own.ConfDir == "" || own.ConfDir == stored.ConfDir) && !n.newSubnets(*stored) {
		if observed = n.observeAndCache(ctx, reading, state); n.loses(observed) {
			observed = nil // changePolicy returns the conflict
		} else if observed.InSync() {
			n.warnInactive(observed)
			n.observedResets(observed)
			return nil
		}
	}
	if err := n.checkDataDir(); err != nil {
		return err
	}
	take := n.Dir.Lock
	if n.dryRun {
		take = n.Dir.DryRun
	}
	lock, err := n.lock(ctx, take)
	if errors.Is(err, store.ErrBusy) {
		return err
	}
	if err != nil {
		return n.changePolicy(ctx, nil, err, state, own)
	}
	defer n.release(lock)
	again, err := n.Dir.Read()
	if err != nil {
		return err
	}
	if digest := again.Digest(); observed != nil && !observed.Failed() && observed.PodsRecorded() && digest != "" && digest == reading.Digest() {
		n.Warn(lock.Tidy(state))
		s := n.Sync(ctx, n.ObserveAgain(ctx, observed), lock)
		n.resets = s.ResetsDue()
		return n.chainErr(s, own.Policy.Chain)
	}
	return n.changePolicy(ctx, lock, nil, again.State(), own)
}

// loses reports whether the network's document is not in force because of a conflict.
func (n *node) loses(s *enforce.State) bool {
	return slices.ContainsFunc(s.Policies(), func(p policy.Policy) bool {
		return slices.ContainsFunc(p.Conflicts, func(c *policy.ConflictError) bool { return c.Superseded.Source == n.source() })
	})
}

// newSubnets reports whether the pod's subnets have to be added to the network's document.
func (n *node) newSubnets(stored policy.Source) bool {
	isNew, err := stored.AddPodSubnets(n.subnets...)
	n.Warn(err)
	return isNew
}

// changePolicy makes a policy that of the network, and syncs the rules. Without the lock, because
// of an error, it passes if nothing must be written.
func (n *node) changePolicy(ctx context.Context, lock *store.Lock, lockErr error, state store.State, own policy.Source) error {
	n.confs = nil             // it may have changed while the lock was waited for
	if len(state.Newer) > 0 { // nothing can be verified
		newer := state.Newer[0].Err
		if n.Observe(ctx, enforce.WithSources(state.Sources, own), state.Record).Exists(own.Policy.Chain) {
			n.Warn(newer)
			return nil
		}
		return withCode(codeRules, fmt.Errorf("chain %s does not exist, and is not created without all documents: %w", own.Policy.Chain, newer))
	}
	if lock != nil {
		n.Warn(lock.Tidy(state))
	}
	proposal := enforce.Proposal{Sources: state.Sources}
	n.restore(&proposal, state.Damaged, own.ID)
	s, err := n.propose(ctx, lock, lockErr, state, proposal, own)
	var unwritable *enforce.UnwritableError
	if !errors.As(err, &unwritable) {
		return err
	}
	// The rules may be right without the pod's subnets, which cannot be recorded or, in STATUS, are not known: for those on
	// record or, without a document, for those that the guard has.
	own.PodSubnets = nil
	if state.Find(own.ID) == nil && !n.pluginFile.Present {
		for _, g := range s.Guard.Observed.Guards {
			for _, r := range g.Scope.Sources {
				if g.Chain == own.Policy.Chain {
					own.PodSubnets = append(own.PodSubnets, r.Prefixes()...)
				}
			}
		}
	}
	_, err = n.propose(ctx, lock, lockErr, state, proposal, own)
	n.Warn(unwritable)
	return err
}

// propose applies a proposal with this policy for the network. The error is an enforce.UnwritableError if the rules
// need a change and the state cannot be written.
func (n *node) propose(
	ctx context.Context, lock *store.Lock, lockErr error, state store.State, p enforce.Proposal, own policy.Source,
) (*enforce.State, error) {
	if err := p.Add(own, n.conflists, n.Warn); err != nil {
		return nil, err
	}
	chain := p.Chain(own.ID)
	if lock == nil {
		s := n.ObserveProposal(ctx, &p, state.Record)
		return s, n.stateUnwritable(s, chain, &enforce.UnwritableError{Err: lockErr})
	}
	s, err := n.ApplyProposal(ctx, lock, state, &p, func(s *enforce.State) error { return cmp.Or(n.podErr(s.Policies()), n.chainErr(s, chain)) })
	n.resets = s.ResetsDue()
	var unwritable *enforce.UnwritableError
	if errors.As(err, &unwritable) {
		err = n.stateUnwritable(s, chain, unwritable)
	}
	return s, err
}

// concernsPod reports whether the files may say something of the pod or its addresses.
func (n *node) concernsPod(r *store.Reading) bool {
	names := []string{n.pod.ContainerID}
	if n.pod.Namespace != "" {
		names = append(names, n.pod.Namespace)
	}
	for _, a := range n.pod.Addresses {
		names = append(names, a.String())
	}
	return r.Mentions("nonMasqueradeNamespaces") && r.Mentions(names...)
}

// exempts reports whether a policy exempts the pods of this pod's namespace.
func (n *node) exempts(p *policy.Policy) bool {
	return slices.ContainsFunc(p.Namespaces, func(x policy.NamedNamespace) bool { return x.Name == n.pod.Namespace })
}

// podErr returns why the pod cannot have the verdict of its namespace: the record of its attachment is missing, and its
// addresses are to be exempt, or are so for another attachment.
func (n *node) podErr(policies []policy.Policy) error {
	if n.recordErr == nil {
		return nil
	}
	for _, a := range n.pod.Addresses {
		has := func(e policy.PrefixAction) bool { return e.Prefix.Contains(a) }
		if slices.ContainsFunc(policies, func(p policy.Policy) bool { return n.exempts(&p) || slices.ContainsFunc(p.ExemptPods, has) }) {
			return withCode(codeRules, fmt.Errorf("cannot record the pod, which nonMasqueradeNamespaces needs: %w", n.recordErr))
		}
	}
	return nil
}

// restore adds the sources of damaged documents, as the conflists on disk state them. The network's own
// document and the record are written again anyway. Without a source that no conflist states, the proposal is
// incomplete.
func (n *node) restore(p *enforce.Proposal, damaged []store.FileError, own policy.SourceID) {
	id := func(l config.Conflist) policy.SourceID { return policy.SourceID{Kind: policy.Network, Name: l.Network} }
	n.warnDamaged(damaged)
	for _, d := range damaged {
		if d.File == n.Dir.RecordPath() || d.File == n.Dir.DocumentPath(own) {
			continue
		}
		all := n.confDir().Conflists
		i := slices.IndexFunc(all, func(l config.Conflist) bool { return len(l.Entries) > 0 && n.Dir.DocumentPath(id(l)) == d.File })
		err := errors.New("no conflist has its network")
		if i >= 0 {
			list := all[i]
			if err = cmp.Or(list.Entries[0].Err, list.DataDirErr(n.pluginFile, n.Dir.Path())); err == nil {
				err = p.Add(policy.Source{ID: id(list), Policy: list.Entries[0].Entry.Policy}, n.conflists, n.Warn)
			}
		}
		if err != nil {
			p.Unreadable++
			n.Warn(fmt.Errorf("%s cannot be written again, so what may be its rules stays: %w", policy.Quote(d.File), err))
		}
	}
}

// chainErr returns what is wrong with the network's own chain. What is wrong with others is a
// warning.
func (n *node) chainErr(s *enforce.State, chain string) error {
	n.Warn(s.RecordErr)
	for _, w := range s.LinearChains() {
		n.Warn(w)
	}
	n.warnInactive(s)
	for _, p := range s.Policies() {
		for _, e := range p.Conflicts.Summary() {
			n.Warn(e)
		}
		if p.Chain != chain {
			n.Warn(s.Err(p.Chain))
		}
	}
	return n.errUnlessNewer(s, chain)
}

// warnInactive warns of keys that have no effect.
func (n *node) warnInactive(s *enforce.State) {
	for _, i := range s.Guard.Inactive {
		n.Warn(i)
	}
	for _, e := range s.NoOutputs() {
		n.Warn(e)
	}
}

// errUnlessNewer returns what is wrong with a chain, except that a newer version wrote its rules:
// those stay in force, with a warning.
func (n *node) errUnlessNewer(s *enforce.State, chain string) error {
	err := s.Err(chain)
	if errors.Is(err, store.ErrNewer) && s.Exists(chain) {
		n.Warn(err)
		return nil
	}
	return err
}

// stateUnwritable lets an ADD pass if the rules are right as they are, and will stay so.
func (n *node) stateUnwritable(s *enforce.State, chain string, cause *enforce.UnwritableError) error {
	if s.ExemptionChanges() { // a DEL of another pod would remove it
		return withCode(codeRules, fmt.Errorf("cannot record which pods nonMasqueradeNamespaces exempts: %w", cause))
	}
	if err := n.errUnlessNewer(s, chain); err != nil {
		if !errors.Is(err, cause) {
			err = errors.Join(cause, err)
		}
		return withCode(codeRules, fmt.Errorf("the rules need a change and the state cannot be written: %w", err))
	}
	n.Warn(fmt.Errorf("the rules are right, but the state cannot be written: %w", cause))
	return nil
}

// inputs returns the digest of what was read, for the verification cache of a program; "" if there can be none.
func (n *node) inputs(r *store.Reading, program string) string {
	return n.Inputs(r, program, n.pluginFile)
}

// entryVerified reports whether this program found this entry valid before.
func (n *node) entryVerified() bool {
	verified := n.cached().Entry
	return verified != "" && verified == n.entryDigest()
}

// sameInputs reports whether the documents and the program are those that were verified.
func (n *node) sameInputs(r *store.Reading) bool {
	verified := n.cached().Inputs
	return verified != "" && verified == n.inputs(r, n.plugin.Program)
}

// rulesVerified reports whether the rules are those that the documents ask for, as an ADD of this network or the
// reconciler found since they were last changed.
func (n *node) rulesVerified(r *store.Reading) bool {
	if n.sameInputs(r) && n.isNow(n.cached()) {
		return true
	}
	version := n.plugin.Version
	c := n.Dir.Published()
	return version != "" && c.Entry == version && c.Inputs == n.inputs(r, version) && n.isNow(c)
}

// isNow reports whether no rule was changed since, nor an address that rules depend on.
func (n *node) isNow(c store.VerificationCache) bool {
	return c.Generation != "" && c.Generation == n.generation() && n.SameAddresses(c.Addresses)
}

// observeAndCache reads the rules. If they are right it writes the verification cache; if that fails the
// next ADD reads the rules, too.
func (n *node) observeAndCache(ctx context.Context, r *store.Reading, s store.State) *enforce.State {
	generation := ""
	if enforce.HasGeneration(s.Record) {
		generation = n.generation()
	}
	observed := n.Observe(ctx, s.Sources, s.Record)
	cache := observed.Verified(n.inputs(r, n.plugin.Program), generation)
	if cache.Entry = n.entryDigest(); cache.Inputs != "" && cache.Entry != "" && !n.loses(observed) && !n.dryRun {
		_ = n.Dir.PutVerificationCache(n.source(), cache)
	}
	return observed
}
