// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
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
	if err := n.Dir.Attach(n.pod); err != nil {
		return fmt.Errorf("record the pod: %w", &enforce.UnwritableError{Err: err})
	}
	if err := n.sync(ctx); err != nil {
		return err
	}
	n.resetConnections(ctx)
	_, err := n.plugin.Stdout.Write(result)
	return err
}

// status returns why an ADD would fail now, or nil.
func (n *node) status(ctx context.Context, args *skel.CmdArgs) error {
	n.Attachments = []store.Attachment{n.attachment(args)} // of no pod: ADD reads the record of one, too
	err := n.checkADD(ctx)
	if err != nil { // containerd and the kubelet show this without a plugin's name
		err = fmt.Errorf("%s: %w", config.PluginType, err)
	}
	return withCode(types.ErrPluginNotAvailable, err)
}

// checkADD returns why an ADD would fail if the files of the dataDir could be written. It does the same as an ADD and asks
// the kernel where that writes rules. A disk that is full or read-only fails every ADD and no STATUS: the kubelet reports
// DiskPressure itself, and evicts the pods of a node that STATUS makes NotReady.
func (n *node) checkADD(ctx context.Context) error {
	if _, err := n.entry(); err != nil {
		return err
	}
	if err := n.Dir.CheckAttach(n.network); err != nil {
		return err
	}
	reading, err := n.Dir.Read()
	if err != nil {
		return err
	}
	own, err := n.ownSource(reading.State(), false)
	if err != nil {
		return err
	}
	isRight, _, err := n.isRight(ctx, reading, own)
	if isRight {
		return err
	}
	if err := n.checkDataDir(); err != nil {
		return err
	}
	lock, err := n.Dir.LockToRead(ctx)
	if err != nil {
		return err
	}
	defer func() { n.Warn(lock.Release()) }()
	state, err := n.readAgain(reading)
	if err != nil {
		return err
	}
	p, err := n.propose(ctx, state, own)
	if p == nil || err != nil {
		return err
	}
	return n.chainErr(n.CheckApply(ctx, state, p), p.Chain(own.ID))
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
	if verified && podVerified() && n.rulesVerified(reading) {
		return nil
	}
	own, err := n.ownSource(reading.State(), verified)
	if err != nil {
		return err
	}
	isRight, cache, err := n.isRight(ctx, reading, own)
	if !isRight {
		return n.change(ctx, reading, own)
	}
	if cache.Inputs != "" && cache.Entry != "" {
		_ = n.Dir.PutVerificationCache(n.source(), cache) // or the next ADD reads the rules, too
	}
	return err
}

// isRight reports whether the rules are those that the network's policy asks for, and the documents have it. Then it returns
// what was verified. The error is why an ADD fails although they are right.
func (n *node) isRight(ctx context.Context, reading *store.Reading, own policy.Source) (bool, store.VerificationCache, error) {
	state := reading.State()
	if !n.isStored(state, own) {
		return false, store.VerificationCache{}, nil
	}
	observed, cache := n.observe(ctx, reading, state)
	if !observed.InSync() || n.loses(observed) {
		return false, cache, nil
	}
	n.warnInactive(observed)
	n.dueResets(observed, false)
	return true, cache, observed.Beyond(n.pod.Addresses)
}

// change makes a policy that of the network, and syncs the rules, with the lock held.
func (n *node) change(ctx context.Context, reading *store.Reading, own policy.Source) error {
	if err := n.checkDataDir(); err != nil {
		return err
	}
	lock, err := n.lock(ctx)
	if err != nil {
		return err
	}
	defer func() { n.Warn(lock.Release()) }()
	state, err := n.readAgain(reading)
	if err != nil {
		return err
	}
	err = n.apply(ctx, lock, state, own)
	n.Warn(lock.Tidy())
	return err
}

// lock takes the lock of the dataDir. The error is an UnwritableError, or an ErrBusy.
func (n *node) lock(ctx context.Context) (*store.Lock, error) {
	lock, err := n.Dir.Lock(ctx)
	if err != nil && !errors.Is(err, store.ErrBusy) {
		return nil, &enforce.UnwritableError{Err: err}
	}
	return lock, err
}

func (n *node) apply(ctx context.Context, lock *store.Lock, state store.State, own policy.Source) error {
	p, err := n.propose(ctx, state, own)
	if p == nil || err != nil {
		return err
	}
	chain := p.Chain(own.ID)
	s, err := n.Apply(ctx, lock, state, p)
	n.dueResets(s, true)
	if errors.Is(err, store.ErrNewer) && s.Exists(chain) { // the rules of the newer version stay in force
		n.Warn(err)
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.Beyond(n.pod.Addresses); err != nil {
		return err
	}
	return n.chainErr(s, chain)
}

// readAgain reads the documents, and the conflists when they are asked for, with the lock held.
func (n *node) readAgain(before *store.Reading) (store.State, error) {
	n.confs = nil // they may have changed while the lock was waited for
	reading, err := n.Dir.ReadAgain(before)
	if err != nil {
		return store.State{}, err
	}
	return reading.State(), nil
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

// propose returns the proposal with this policy for the network, or nil if its chain stays as it is: beside documents that
// cannot be read nothing is verified, and the ADD passes while the chain exists.
func (n *node) propose(ctx context.Context, state store.State, own policy.Source) (*enforce.Proposal, error) {
	n.warnUnreadable(state)
	p := &enforce.Proposal{Sources: state.Sources, Lost: n.Dir.Lost(state, own.ID)}
	if err := p.Add(own, func() enforce.Conflists { return n.confDir() }, n.Warn); err != nil {
		return nil, err
	}
	isKept := len(p.Lost) > 0 && state.Find(own.ID) != nil
	if isKept && n.ObserveProposal(ctx, p, state.Record).Exists(p.Chain(own.ID)) {
		return nil, nil
	}
	return p, nil
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

// chainErr returns what is wrong with the network's own chain. What is wrong with others is a
// warning.
func (n *node) chainErr(s *enforce.State, chain string) error {
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
