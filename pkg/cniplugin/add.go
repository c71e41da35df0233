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
	"github.com/ip-masq/ip-masq-cni/pkg/podinfo"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// add records the attachment and ensures the rules. If all is right it only reads.
func (n *node) add(ctx context.Context, args *skel.CmdArgs) error {
	prevResult, result, resultErr := n.result()
	addresses := podinfo.Networks(prevResult, args.IfName)
	if count := len(addresses); count > podinfo.MaxAddresses {
		n.Warn(fmt.Errorf("the pod has %d addresses on %s; nonMasqueradeNamespaces is about %d of them", count, policy.Quote(args.IfName), podinfo.MaxAddresses))
	}
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

// status returns why an ADD would fail now, or nil. It ensures as ADD does, with a lock that writes nothing, so that the
// two agree.
func (n *node) status(ctx context.Context, args *skel.CmdArgs) error {
	n.Attachments = []store.Attachment{n.attachment(args)} // of no pod: ADD reads the record of one, too
	_, err := n.entry()
	if err == nil {
		var reading *store.Reading
		if reading, err = n.Dir.Read(); err == nil {
			_, err = n.ensure(ctx, reading, false, n.Dir.DryRun)
		}
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
	verified := n.sameInputs(reading) && n.entryVerified()
	podVerified := func() bool { return !n.concernsPod(reading) || n.PodsRecorded(reading.State()) }
	if verified && n.recordErr == nil && podVerified() && n.rulesVerified(reading) {
		return nil
	}
	cache, err := n.ensure(ctx, reading, verified, n.Dir.Lock)
	if cache.Inputs != "" && cache.Entry != "" {
		_ = n.Dir.PutVerificationCache(n.source(), cache) // or the next ADD reads the rules, too
	}
	return err
}

// ensure ensures the rules by what was read, without the lock if they are right. Then it returns what was verified.
// Verified says that an earlier ADD validated the entry.
func (n *node) ensure(
	ctx context.Context, reading *store.Reading, verified bool, take func(context.Context) (*store.Lock, error),
) (cache store.VerificationCache, err error) {
	state := reading.State()
	if n.recordErr != nil {
		if err := cmp.Or(n.podErr(state), n.heldErr()); err != nil {
			return cache, err
		}
	}
	own, err := n.ownSource(state, verified)
	if err != nil {
		return cache, err
	}
	if n.isStored(state, own) {
		var observed *enforce.State
		if observed, cache = n.observe(ctx, reading, state); observed.InSync() && !n.loses(observed) {
			n.warnInactive(observed)
			n.dueResets(observed, false)
			return cache, observed.Beyond(n.pod.Addresses)
		}
	}
	if err := n.checkDataDir(); err != nil {
		return cache, err
	}
	lock, err := take(ctx)
	if errors.Is(err, store.ErrBusy) {
		return cache, err
	}
	if err != nil {
		lock = n.Dir.Unwritable(err)
	}
	defer func() { n.Warn(lock.Release()) }()
	n.confs = nil // it may have changed while the lock was waited for
	if reading, err = n.Dir.ReadAgain(reading); err != nil {
		return cache, err
	}
	err = n.write(ctx, lock, reading.State(), own)
	n.Warn(lock.Tidy())
	return cache, err
}

// isStored reports whether the documents can be read, and have the network's policy and the pod's subnets.
func (n *node) isStored(state store.State, own policy.Source) bool {
	stored := state.Find(own.ID)
	if len(n.Dir.Lost(state, own.ID)) > 0 || stored == nil || stored.Superseded ||
		!stored.Policy.Equal(own.Policy) || own.ConfDir != "" && own.ConfDir != stored.ConfDir {
		return false
	}
	with := *stored
	isNew, err := with.AddPodSubnets(n.subnets...)
	n.Warn(err)
	return !isNew
}

// ownSource returns the source of the network: the stored one if its entry was verified, else that of the entry.
func (n *node) ownSource(state store.State, verified bool) (policy.Source, error) {
	own := policy.Source{ID: n.source(), PodSubnets: n.subnets, ConfDir: n.pluginFile.PolicyDir()}
	if stored := state.Find(own.ID); verified && stored != nil {
		own.Policy = stored.Policy
		return own, nil
	}
	entry, err := n.entry()
	agent := policy.SourceID{Kind: policy.AgentFiles}
	isAgents := func(d store.FileError) bool { return d.File == n.Dir.DocumentPath(agent) }
	if err == nil && entry.RequireAgentConfig && state.Find(agent) == nil && !slices.ContainsFunc(state.Unreadable, isAgents) {
		err = withCode(types.ErrTryAgainLater, errors.New("requireAgentConfig: no policy of the agent files is stored yet; "+
			"start ip-masq-reconciler with an agent_config_dir, or remove the key"))
	}
	own.Policy = entry.Policy
	return own, err
}

// loses reports whether the network's document is not in force because of a conflict.
func (n *node) loses(s *enforce.State) bool {
	return slices.ContainsFunc(s.Policies(), func(p policy.Policy) bool {
		return slices.ContainsFunc(p.Conflicts, func(c *policy.ConflictError) bool { return c.Superseded.Source == n.source() })
	})
}

// write makes a policy that of the network, and syncs the rules.
func (n *node) write(ctx context.Context, lock *store.Lock, state store.State, own policy.Source) error {
	n.warnUnreadable(state)
	s, chain, err := n.apply(ctx, lock, state, own)
	var unwritable *enforce.UnwritableError
	if !errors.As(err, &unwritable) {
		return err
	}
	if stored := state.Find(own.ID); s.Err(chain) == nil && stored != nil && !stored.Policy.Equal(own.Policy) &&
		n.Observe(ctx, state.Sources, state.Record).Err(chain) != nil { // an ADD stored it and failed then, and the next one would write its rules
		return withCode(codeRules, fmt.Errorf("the document on disk asks for other rules, and the state cannot be written: %w", unwritable))
	}
	if n.stateUnwritable(s, chain, unwritable) == nil {
		return nil
	}
	// The rules may be right without the pod's subnets, which cannot be recorded or, in STATUS, are not known: for those on
	// record or, without a document, for those that the guard has.
	own.PodSubnets = nil
	if state.Find(own.ID) == nil && !n.pluginFile.Present {
		for _, g := range s.Guard.Observed.Guards {
			for _, r := range g.Scope.Sources {
				if g.Chain == chain {
					own.PodSubnets = append(own.PodSubnets, r.Prefixes()...)
				}
			}
		}
	}
	s, chain, err = n.apply(ctx, lock, state, own)
	if errors.As(err, &unwritable) {
		err = n.stateUnwritable(s, chain, unwritable)
	}
	return err
}

// apply applies a proposal with this policy for the network, and returns the chain of the one that is in force then. If
// other documents cannot be read, nothing is verified: the ADD passes while the chain exists.
func (n *node) apply(ctx context.Context, lock *store.Lock, state store.State, own policy.Source) (_ *enforce.State, chain string, err error) {
	p := enforce.Proposal{Sources: state.Sources, Lost: n.Dir.Lost(state, own.ID)}
	if err := p.Add(own, func() enforce.Conflists { return n.confDir() }, n.Warn); err != nil {
		return nil, "", err
	}
	chain = p.Chain(own.ID)
	if len(p.Lost) > 0 && state.Find(own.ID) != nil && n.ObserveProposal(ctx, &p, state.Record).Exists(chain) {
		return nil, chain, nil
	}
	if err := n.podErr(store.State{Sources: p.Sources, Record: state.Record}); err != nil {
		return nil, chain, err
	}
	s, err := n.Apply(ctx, lock, state, &p)
	n.dueResets(s, true)
	if errors.Is(err, store.ErrNewer) && s.Exists(chain) { // the rules of the newer version stay in force
		n.Warn(err)
		return s, chain, nil
	}
	if err == nil {
		err = cmp.Or(s.Beyond(n.pod.Addresses), n.chainErr(s, chain))
	}
	return s, chain, err
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
func (n *node) podErr(s store.State) error {
	if n.recordErr == nil {
		return nil
	}
	policies := n.Policies(s)
	for _, a := range n.pod.Addresses {
		has := func(e policy.PrefixAction) bool { return e.Prefix.Contains(a) }
		if slices.ContainsFunc(policies, func(p policy.Policy) bool { return n.exempts(&p) || slices.ContainsFunc(p.ExemptPods, has) }) {
			return withCode(codeRules, fmt.Errorf("cannot record the pod, which nonMasqueradeNamespaces needs: %w", n.recordErr))
		}
	}
	return nil
}

// heldErr returns that the pod has an address that the record of another pod holds: a list of namespaces that comes into
// force later would be about that one.
func (n *node) heldErr() error {
	pods, _, _ := n.Dir.Pods() // recordErr says what is wrong
	for _, p := range pods {
		for _, a := range n.pod.Addresses {
			if p.Attachment != n.pod.Attachment && slices.Contains(p.Addresses, a) {
				return withCode(codeRules, fmt.Errorf("the record of another pod has the address %s, and this pod cannot be recorded: %w", a, n.recordErr))
			}
		}
	}
	return nil
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

// entryVerified reports whether this program found this entry valid before.
func (n *node) entryVerified() bool {
	verified := n.cached().Entry
	return verified != "" && verified == n.entryDigest()
}

// sameInputs reports whether the documents and the program are those that were verified.
func (n *node) sameInputs(r *store.Reading) bool {
	verified := n.cached().Inputs
	return verified != "" && verified == n.Inputs(r, n.plugin.Program, n.pluginFile)
}

// rulesVerified reports whether the rules are those that the documents ask for, as an ADD of this network or the
// reconciler found since they were last changed.
func (n *node) rulesVerified(r *store.Reading) bool {
	if n.sameInputs(r) && n.isNow(n.cached()) {
		return true
	}
	version := n.plugin.Version
	c := n.Dir.Published()
	return version != "" && c.Entry == version && c.Inputs == n.Inputs(r, version, n.pluginFile) && n.isNow(c)
}

// isNow reports whether no rule was changed since, nor an address that rules depend on.
func (n *node) isNow(c store.VerificationCache) bool {
	return c.Generation != "" && c.Generation == n.generation() && n.SameAddresses(c.Addresses)
}

// observe reads the rules, and returns what it verified.
func (n *node) observe(ctx context.Context, r *store.Reading, s store.State) (*enforce.State, store.VerificationCache) {
	generation := ""
	if enforce.HasGeneration(s.Record) {
		generation = n.generation()
	}
	observed := n.Observe(ctx, s.Sources, s.Record)
	if n.loses(observed) {
		return observed, store.VerificationCache{}
	}
	cache := observed.Verified(n.Inputs(r, n.plugin.Program, n.pluginFile), generation)
	cache.Entry = n.entryDigest()
	return observed, cache
}
